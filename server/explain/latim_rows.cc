#include "server/explain/latim_rows.h"

#include <algorithm>
#include <cmath>

#include "server/kernels/gemm.h"

namespace mambascope::explain {
namespace {

constexpr int64_t kGemmWork = int64_t{1} << 30;  // multiply-adds of a slice, about 20 ms
constexpr int64_t kTileTokens = 64;              // of one row in one task
constexpr int64_t kChunkPairs =
    17 * kTileTokens;  // of one matrix product: so many that packing pays

// sum_m term(m): four sums, so that no addition waits for the one before.
template <class Term>
double Sum(int64_t count, const Term& term) {
  double sums[4] = {};
  int64_t m = 0;
  for (; m + 4 <= count; m += 4) {
    for (int64_t k = 0; k < 4; ++k) sums[k] += term(m + k);
  }
  for (; m < count; ++m) sums[0] += term(m);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace

LatimRows::LatimRows(const model::ModelConfig& config, Want want, int64_t tokens)
    : config_(config), want_(want), tokens_(tokens), layer_(config, want.activation, tokens) {}

int64_t LatimRows::Pairs(int64_t first, int64_t count) const {
  int64_t pairs = 0;
  for (int64_t i = first; i < first + count; ++i) pairs += layer_.ReadTo(i) + 1;
  return pairs;
}

int64_t LatimRows::Cuts(int64_t first, int64_t count) const {
  const int64_t work = Pairs(first, count) * config_.d_inner * config_.d_model;
  return (work + kGemmWork - 1) / kGemmWork;
}

int64_t LatimRows::Steps(int64_t first, int64_t count) const {
  int64_t steps = 1;
  for (int64_t i = first, end = first + count, block = 0; i < end; i += block) {
    block = BlockAt(i, end);
    steps += 1 + Cuts(i, block);
  }
  return steps;
}

int64_t LatimRows::ChunkPairs(int64_t count) const {
  return std::min(kChunkPairs, layer_.BlockRows(count) * (tokens_ + 1));
}

// Every row of a block may end with a tile that is not full.
int64_t LatimRows::ChunkTiles(int64_t count) const {
  return layer_.BlockRows(count) + ChunkPairs(count) / kTileTokens;
}

int64_t LatimRows::MemoryBytes(int64_t count) const {
  const int64_t block = layer_.BlockRows(count), pairs = ChunkPairs(count);
  const int64_t d_model = config_.d_model;
  const int64_t tiles = block * ((tokens_ + kTileTokens) / kTileTokens);
  const int64_t floats = pairs * (config_.d_inner + d_model) + 2 * block * d_model;
  const int64_t doubles = block * (2 * tokens_ + d_model) + ChunkTiles(count) * d_model + 3 * tiles;
  return layer_.MemoryBytes(count) + 4 * floats + 8 * doubles;
}

void LatimRows::Open(const Subject& subject, int32_t layer, const float* stream,
                     const float* directions, int64_t first, int64_t count) {
  subject_ = &subject;
  stream_ = stream;
  directions_ = directions;
  next_row_ = first;
  end_row_ = first + count;
  open_ = false;
  layer_.Open(subject, layer, stream);
}

bool LatimRows::Step() {
  if (!open_) {
    BeginBlock();  // its scans are a step of their own
    return false;
  }
  const auto tiles = static_cast<int64_t>(tiles_.size());
  const int64_t begin = tiles * cut_ / cuts_, end = tiles * (cut_ + 1) / cuts_;
  for (int64_t tile = begin; tile < end;) {
    int64_t next = tile, pairs = 0;
    while (next < end && pairs + tiles_[next].size() <= kChunkPairs) pairs += tiles_[next++].size();
    SumTiles(std::span(tiles_).subspan(tile, next - tile));
    tile = next;
  }
  if (++cut_ < cuts_) return false;
  FinishBlock();
  open_ = false;
  return true;
}

void LatimRows::BeginBlock() {
  const int64_t first = next_row_, count = BlockAt(first, end_row_), d_model = config_.d_model;
  next_row_ += count;
  open_ = true;
  cut_ = 0;
  cuts_ = Cuts(first, count);
  layer_.OpenRows(first, count, nullptr);
  outputs_.Reserve(count * d_model);
  inputs_.Reserve(ChunkPairs(count) * config_.d_inner);
  contributions_.Reserve(ChunkPairs(count) * d_model);
  sums_.Reserve(ChunkTiles(count) * d_model);
  kernels::Linear(*subject_->pool,
                  {model::MixedOf(layer_.activations()) + first * config_.d_inner, count,
                   config_.d_inner, config_.d_inner},
                  layer_.weights().out_proj, layer_.weights().out_proj_bias,
                  {outputs_.data(), count, d_model, d_model});
  tiles_.clear();
  rows_.resize(count);
  measures_.resize(count);
  for (int64_t slot = 0; slot < count; ++slot) {
    const int64_t i = first + slot, pairs = layer_.ReadTo(i) + 1;
    for (int64_t begin = 0; begin < pairs; begin += kTileTokens) {
      tiles_.push_back({slot, begin, std::min(pairs, begin + kTileTokens)});
    }
    Measure& measure = measures_[slot];
    const float* const h = stream_ + i * d_model;
    const float* const out = outputs_.data() + slot * d_model;
    measure.residual = want_.residual ? h : nullptr;
    measure.direction = nullptr;
    if (directions_ != nullptr) {
      const float* const q = directions_ + i * d_model;
      if (std::any_of(q, q + d_model, [](float v) { return v != 0; })) measure.direction = q;
    }
    measure.output.assign(out, out + d_model);
    for (int64_t m = 0; want_.residual && m < d_model; ++m) measure.output[m] += h[m];
    measure.output_norm = Sum(d_model, [&](int64_t m) { return std::fabs(measure.output[m]); });
    measure.sum.assign(d_model, 0);
    Row& row = rows_[slot];
    row.index = i;
    row.values.assign(pairs - 1, 0);
    row.parts.assign(measure.direction != nullptr ? pairs - 1 : 0, 0);
    row.constant_part = 0;
  }
}

void LatimRows::SumTiles(std::span<const Tile> tiles) {
  const int64_t d_inner = config_.d_inner, d_model = config_.d_model;
  const auto count = static_cast<int64_t>(tiles.size());
  std::vector<int64_t> at(count + 1, 0);  // a tile's first pair
  for (int64_t t = 0; t < count; ++t) at[t + 1] = at[t] + tiles[t].size();
  subject_->pool->Run(count, [&](int64_t t) {
    const Tile& tile = tiles[t];
    const int64_t i = rows_[tile.slot].index, reads = layer_.ReadTo(i);
    float* const out = inputs_.data() + at[t] * d_inner;
    if (tile.begin < reads) {
      layer_.Inputs(i, tile.begin, std::min(tile.end, reads), /*accumulate=*/false, out);
    }
    if (tile.end > reads)
      layer_.Constant(i, /*accumulate=*/false, out + (reads - tile.begin) * d_inner);
  });
  kernels::Linear(*subject_->pool, {inputs_.data(), at[count], d_inner, d_inner},
                  layer_.weights().out_proj, nullptr,
                  {contributions_.data(), at[count], d_model, d_model});
  subject_->pool->Run(count, [&](int64_t t) {
    Reduce(tiles[t], contributions_.data() + at[t] * d_model, sums_.data() + t * d_model);
  });
  for (int64_t t = 0; t < count; ++t) {
    std::vector<double>& sum = measures_[tiles[t].slot].sum;
    for (int64_t m = 0; m < d_model; ++m) sum[m] += sums_[t * d_model + m];
  }
}

// Called from tasks: writes what belongs to the tile alone.
void LatimRows::Reduce(const Tile& tile, const float* contributions, double* sum) {
  const Measure& measure = measures_[tile.slot];
  Row& row = rows_[tile.slot];
  const int64_t d_model = config_.d_model, reads = layer_.ReadTo(row.index);
  const float* const bias = layer_.weights().out_proj_bias;
  std::fill_n(sum, d_model, 0.0);
  for (int64_t j = tile.begin; j < tile.end; ++j) {
    const float* const T = contributions + (j - tile.begin) * d_model;
    for (int64_t m = 0; m < d_model; ++m) sum[m] += T[m];
    double part = 0;
    if (measure.direction != nullptr) {
      part = Sum(d_model, [&](int64_t m) { return double{measure.direction[m]} * T[m]; });
    }
    if (j < reads) {
      if (measure.direction != nullptr) row.parts[j] = part;
      switch (want_.norm) {
        case v1::Latim::NORM_L1:
          row.values[j] = Sum(d_model, [&](int64_t m) { return std::fabs(T[m]); });
          break;
        case v1::Latim::NORM_L2:
          row.values[j] = std::sqrt(Sum(d_model, [&](int64_t m) { return double{T[m]} * T[m]; }));
          break;
        default:
          row.values[j] = Gain(measure, T, j == row.index);
      }
      continue;
    }
    for (int64_t m = 0; bias != nullptr && m < d_model; ++m) sum[m] += bias[m];
    if (bias != nullptr && measure.direction != nullptr) {
      part += Sum(d_model, [&](int64_t m) { return double{measure.direction[m]} * bias[m]; });
    }
    row.constant_part = part;
  }
}

// (||y||_1 - ||y - T||_1)^+, T the row's own with the residual.
double LatimRows::Gain(const Measure& measure, const float* contribution, bool own) const {
  const float* const y = measure.output.data();
  const float* const h = own ? measure.residual : nullptr;
  const double rest =
      h == nullptr ? Sum(config_.d_model,
                         [&](int64_t m) { return std::fabs(double{y[m]} - contribution[m]); })
                   : Sum(config_.d_model, [&](int64_t m) {
                       return std::fabs(double{y[m]} - (double{contribution[m]} + h[m]));
                     });
  return std::max(measure.output_norm - rest, 0.0);  // NaN stays
}

void LatimRows::FinishBlock() {
  const int64_t d_model = config_.d_model;
  for (size_t slot = 0; slot < rows_.size(); ++slot) {
    Row& row = rows_[slot];
    const std::vector<double>& sum = measures_[slot].sum;
    const float* const out = outputs_.data() + static_cast<int64_t>(slot) * d_model;
    double missed = 0, whole = 0;
    for (int64_t m = 0; m < d_model; ++m) {
      missed += (out[m] - sum[m]) * (out[m] - sum[m]);
      whole += double{out[m]} * out[m];
    }
    row.error = whole == 0 ? std::sqrt(missed) : std::sqrt(missed / whole);
    if (want_.norm != v1::Latim::NORM_ALTI) continue;
    double total = 0;
    for (const double value : row.values) total += value;
    if (total == 0) row.values[row.index] = total = 1;
    for (double& value : row.values) value /= total;
  }
}

}  // namespace mambascope::explain
