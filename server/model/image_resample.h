#pragma once

#include <cstdint>
#include <vector>

namespace mambascope::model {

// Resampling of 8-bit RGB as PIL's Image.resize does it, bit for bit: antialiased (the filter
// widens when a picture shrinks), first across, then down, each rounded to 8 bits, in integers. A
// model sees the pixels it was trained and evaluated with.

enum class ResampleFilter { kBilinear, kBicubic };  // bicubic with a = -1/2

// One axis: which input positions make each output position, and how much.
struct ResampleAxis {
  struct Output {
    int32_t first = 0, count = 0;  // input positions; none: black
    int32_t weights = 0;           // where theirs begin in `weights`
  };
  int64_t input = 0;
  std::vector<Output> outputs;
  std::vector<int32_t> weights;  // in units of 2^-22

  int64_t bytes() const {
    return static_cast<int64_t>(outputs.capacity() * sizeof(Output) +
                                weights.capacity() * sizeof(int32_t));
  }
};

// An axis of `input` positions resized to `resized`, of which [start, start + count) are wanted;
// those outside [0, resized) are black. input and resized >= 1.
ResampleAxis PlanResampling(int64_t input, int64_t resized, int64_t start, int64_t count,
                            ResampleFilter filter);

// Takes a picture row by row and holds only what the result needs.
class Resampler {
 public:
  Resampler(ResampleAxis across, ResampleAxis down);

  // The next row, [across.input, 3]. Neither throws nor allocates: libraries that leave errors by
  // longjmp may call it.
  void AddRow(const uint8_t* rgb) noexcept;
  // Once all rows are in: [down.outputs, across.outputs, 3].
  std::vector<uint8_t> Finish() const;

 private:
  const ResampleAxis across_, down_;
  int64_t next_row_ = 0;
  int64_t first_row_ = 0, end_row_ = 0;  // the rows that `down_` needs
  std::vector<uint8_t> rows_;            // [end_row_ - first_row_, across.outputs, 3]
};

}  // namespace mambascope::model
