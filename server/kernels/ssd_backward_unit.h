#pragma once

#include <algorithm>
#include <cstdint>

#include "server/base/array.h"
#include "server/kernels/ssd_backward.h"

namespace mambascope::kernels {

// Tokens of a chunk. What is done once a chunk (states) shrinks with its length, what is done for
// pairs of its tokens grows.
constexpr int64_t kQ = 64;
// Heads of one task, all of one group: they share C B^T, and their parts of dB and dC are added
// before those of other tasks.
constexpr int64_t kUnitHeads = 4;
constexpr int64_t kPad = 16;  // the widest register

inline int64_t Padded(int64_t count) { return (count + kPad - 1) / kPad * kPad; }
inline int64_t SsdChunks(int64_t tokens) { return (tokens + kQ - 1) / kQ; }

struct SsdUnit {
  int64_t group, first_head, heads;
};

// What one task needs, in one array; rows padded with zeros to N = Padded(d_state) and P =
// Padded(head_dim). Without `gradients` only what the adjoint needs.
class SsdUnitScratch {
 public:
  SsdUnitScratch(const SsdBackwardInputs& in, bool gradients)
      : N(Padded(in.d_state)),
        P(Padded(in.head_dim)),
        memory_(Floats(in.tokens, in.d_state, in.head_dim, gradients)) {
    std::fill(memory_.begin(), memory_.end(), 0.0f);
    float* at = memory_.data();
    Lay(in.tokens, gradients, &at);
  }
  static int64_t Floats(int64_t tokens, int64_t d_state, int64_t head_dim, bool gradients) {
    SsdUnitScratch sizes(Padded(d_state), Padded(head_dim));
    float* at = nullptr;
    return sizes.Lay(tokens, gradients, &at);
  }

  const int64_t N, P;
  // Of the group's chunk: B, C, C B^T, and of the unit sum_h T (below).
  float *B, *C;       // [kQ, N]
  float* Bt;          // [N, kQ]
  float *scores, *T;  // [kQ, kQ]
  float *dB, *dC;     // [kQ, N], the unit's sums
  // Of one head's chunk.
  float *decay, *from_start, *to_end, *delta;  // [kQ]: a[i]; prod_{k <= i} a[k]; prod_{k > j} a[k]
  float *s, *q, *R;                            // [kQ]: what SumPaths adds
  float *L, *weights;                          // [kQ, kQ]
  float *dy, *dy_decayed, *u;                  // [kQ, P]
  float *drive, *drive_decayed;                // [kQ, P]: delta x
  float* drive_t;                              // [P, kQ]
  float* dC_head;                              // [kQ, N]
  float* gradient_t;                           // [P, N]
  // Of each head: the gradient of the state after the chunk, [N, P], and the states before each
  // chunk, [P, N].
  float* Gradient(int64_t head) { return gradients_ + head * N * P; }
  float* State(int64_t head, int64_t chunk) {
    return states_ + (chunk * kUnitHeads + head) * N * P;
  }

 private:
  SsdUnitScratch(int64_t N, int64_t P) : N(N), P(P) {}

  // Places everything from *at on and returns the number of floats.
  int64_t Lay(int64_t tokens, bool all, float** at) {
    int64_t floats = 0;
    const auto take = [&](float** to, int64_t count) {
      if (*at != nullptr) *to = *at + floats;
      floats += count;
    };
    for (float** v : {&decay, &from_start, &to_end, &delta, &s, &q, &R}) take(v, kQ);
    for (float** v : {&B, &C, &Bt}) take(v, kQ * N);
    for (float** v : {&scores, &T, &L, &weights}) take(v, kQ * kQ);
    for (float** v : {&dy, &dy_decayed, &u}) take(v, kQ * P);
    take(&gradients_, kUnitHeads * N * P);
    if (!all) return floats;
    for (float** v : {&dB, &dC, &dC_head}) take(v, kQ * N);
    for (float** v : {&drive, &drive_decayed, &drive_t}) take(v, kQ * P);
    take(&gradient_t, N * P);
    take(&states_, SsdChunks(tokens) * kUnitHeads * N * P);
    return floats;
  }

  float *gradients_ = nullptr, *states_ = nullptr;
  Array<float> memory_;
};

}  // namespace mambascope::kernels
