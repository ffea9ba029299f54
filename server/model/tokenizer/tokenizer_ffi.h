#pragma once

// C interface of the tokenizer library (src/lib.rs), kept by hand on both sides: change them
// together. Only server/model/tokenizer.cc includes it; everyone else uses
// server/model/tokenizer.h.
//
// Errors: no function aborts or unwinds. One that can fail returns false or null and puts a reason
//   (UTF-8, free it with mambascope_text_free) in `*error`; its other outputs are then untouched.
//   A panic inside the library is such an error.
// Ownership: what a function hands out goes back to the matching free function, exactly once;
// inputs
//   are borrowed until the call returns. Freeing null, or an empty text or encoding, does nothing.
// Threads: every function may run on many threads at once, with the same tokenizer too, except that
//   freeing a tokenizer must come last.

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#else
#include <stdbool.h>
#endif

typedef struct MambascopeTokenizer MambascopeTokenizer;

typedef struct {
  uint8_t* data;  // not terminated; may hold NUL bytes
  size_t size;
} MambascopeText;

typedef struct {
  uint32_t id;
  uint32_t begin;  // bytes of the original text, half-open, as the library reports them
  uint32_t end;
  bool added;  // by the template, so its span says nothing
} MambascopeEncodedToken;

typedef struct {
  MambascopeEncodedToken* tokens;
  size_t size;
} MambascopeEncoding;

// From the bytes of a tokenizer.json. Its truncation and padding are dropped, and a post-processor
// that trims offsets is told not to.
MambascopeTokenizer* mambascope_tokenizer_load(const uint8_t* json, size_t size,
                                               MambascopeText* error);
void mambascope_tokenizer_free(MambascopeTokenizer* tokenizer);

// One past the largest id, added tokens included.
uint32_t mambascope_tokenizer_vocabulary_size(const MambascopeTokenizer* tokenizer);

// Puts the spelling of `id` in `*piece`, empty if no token has this id, and whether it is special.
bool mambascope_tokenizer_piece(const MambascopeTokenizer* tokenizer, uint32_t id,
                                MambascopeText* piece, bool* special, MambascopeText* error);

bool mambascope_tokenizer_encode(const MambascopeTokenizer* tokenizer, const uint8_t* text,
                                 size_t size, bool add_special_tokens, MambascopeEncoding* encoding,
                                 MambascopeText* error);

// Ids that no token has add nothing: the caller checks them.
bool mambascope_tokenizer_decode(const MambascopeTokenizer* tokenizer, const uint32_t* ids,
                                 size_t size, bool skip_special_tokens, MambascopeText* text,
                                 MambascopeText* error);

void mambascope_text_free(MambascopeText text);
void mambascope_encoding_free(MambascopeEncoding encoding);

#ifdef __cplusplus
}  // extern "C"
#endif
