#pragma once

#include <cstdio>
#include <cstdlib>

// For our own broken invariants only: bad input and bad files are statuses, never aborts.
#define MS_CHECK(condition)                                                                  \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: broken invariant: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)
