#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mambascope/v1/explanation.pb.h"
#include "server/base/array.h"
#include "server/explain/latim_layer.h"

namespace mambascope::explain {

// Rows of one layer's contributions as numbers (methods.md, section 5), step by step:
//   L1, L2: ||T_i(x_j)||      ALTI: (||y_i||_1 - ||y_i - T_i(x_j)||_1)^+, rows scaled to sum 1
// with y_i the mixer's output, or with the residual y_i = h_i + out_i and T_i(x_i) + h_i; and, if
// asked for, the parts q_i . T_i(x_j) of a logit. T is formed for some hundred pairs (i, j) at a
// time and never kept. Owned by one thread.
class LatimRows {
 public:
  struct Want {
    v1::Latim::Activation activation = v1::Latim::ACTIVATION_GATE;
    v1::Latim::Norm norm = v1::Latim::NORM_ALTI;  // L1, L2 or ALTI
    bool residual = false;                        // of ALTI
  };
  LatimRows(const model::ModelConfig& config, Want want, int64_t tokens);

  // Of a layer's rows [first, first + count): calls of Open and Step, pairs (i, j), and an upper
  // bound of what is allocated here.
  int64_t Steps(int64_t first, int64_t count) const;
  int64_t Pairs(int64_t first, int64_t count) const;
  int64_t MemoryBytes(int64_t count) const;

  // The first step of a layer. `stream` [tokens, d_model] enters it; `directions` [tokens, d_model]
  // are the q_i, or null.
  void Open(const Subject& subject, int32_t layer, const float* stream, const float* directions,
            int64_t first, int64_t count);
  // The next one. True if a block of rows is complete: then those below hold until the next call.
  bool Step();
  bool done() const { return next_row_ == end_row_ && !open_; }

  struct Row {
    int64_t index = 0;
    std::vector<double> values;  // [tokens that it reads] norms or shares
    std::vector<double> parts;   // likewise; empty without a direction here
    double constant_part = 0;    // q . const_i
    double error = 0;            // relative L2 error of sum_j T + const against the mixer's output
  };
  std::span<const Row> rows() const { return rows_; }

 private:
  // Some tokens of one row; after the last one comes the constant.
  struct Tile {
    int64_t slot, begin, end;
    int64_t size() const { return end - begin; }
  };
  // A row's fixed numbers while its tiles are summed.
  struct Measure {
    const float* residual = nullptr;   // h_i, if it takes part
    const float* direction = nullptr;  // q_i
    std::vector<float> output;         // [d_model] y_i
    double output_norm = 0;
    std::vector<double> sum;  // [d_model] of T and the constant
  };

  int64_t BlockAt(int64_t row, int64_t end) const { return layer_.BlockRows(end - row); }
  int64_t Cuts(int64_t first, int64_t count) const;
  int64_t ChunkPairs(int64_t count) const;
  int64_t ChunkTiles(int64_t count) const;
  void BeginBlock();
  void SumTiles(std::span<const Tile> tiles);
  void Reduce(const Tile& tile, const float* contributions, double* sum);
  double Gain(const Measure& measure, const float* contribution, bool own) const;
  void FinishBlock();

  const model::ModelConfig config_;
  const Want want_;
  const int64_t tokens_;
  LatimLayer layer_;

  const Subject* subject_ = nullptr;
  const float* stream_ = nullptr;
  const float* directions_ = nullptr;
  int64_t next_row_ = 0, end_row_ = 0;  // rows that no block has taken yet
  bool open_ = false;                   // a block is under way
  int64_t cut_ = 0, cuts_ = 0;          // of its tiles
  std::vector<Tile> tiles_;
  std::vector<Measure> measures_;
  std::vector<Row> rows_;
  Array<float> outputs_;                 // [rows, d_model] the mixer's
  Array<float> inputs_, contributions_;  // of a chunk: [pairs, d_inner], [pairs, d_model]
  Array<double> sums_;                   // of a chunk's tiles
};

}  // namespace mambascope::explain
