#include "server/model/cuda/device_pass.h"

#include <algorithm>
#include <vector>

#include "server/base/check.h"
#include "server/base/status.h"
#include "server/kernels/cuda/embedding.h"
#include "server/kernels/cuda/finite.h"
#include "server/kernels/cuda/image_tokens.h"
#include "server/kernels/cuda/mean_pooling.h"
#include "server/kernels/cuda/rms_norm.h"
#include "server/model/cuda/device_mixer.h"
#include "server/model/cuda/sequence_state.h"
#include "server/model/vision.h"

namespace mambascope::model::cuda {
namespace {

namespace device = kernels::cuda;
using device::Gemm;
using kernels::ElementType;
using kernels::WeightMatrix;

// Rows of logits at once, so that a long prompt whose every row is wanted takes no more memory: at
// 50,280 words 25 MB, and three times that for bf16 weights. The bits of a row do not depend on it.
constexpr int64_t kHeadRows = 128;

SequenceState& StateOf(const Piece& piece) {
  return static_cast<SequenceState&>(*piece.state->device());
}

// One row of logits that somebody wants.
struct WantedRow {
  int32_t from = 0;     // row of the head's source: the stream's, or with pooling its piece's mean
  int32_t piece = 0;    // whose it is
  float* to = nullptr;  // [outputs] on the host
};

class Pass {
 public:
  Pass(const ModelConfig& config, const WeightViews& weights, ThreadPool& pool, PassWorkspace& w,
       std::span<Piece> pieces, std::span<const int32_t> seq_start)
      : config_(config),
        weights_(weights),
        pool_(pool),
        w_(w),
        pieces_(pieces),
        seq_start_(seq_start),
        stream_(w.stream.get()) {}

  absl::Status Run(absl::FunctionRef<bool()> stop) {
    ListRows();
    RETURN_IF_ERROR(Reserve());  // nothing has started when memory is short
    RETURN_IF_ERROR(Send());
    RETURN_IF_ERROR(config_.family != Family::kVim  ? EmbedTokens()
                    : pieces_[0].embeddings.empty() ? EmbedImages()
                                                    : absl::OkStatus());
    RETURN_IF_ERROR(PlaceEmbeddings());
    RETURN_IF_ERROR(device::RmsNorm(w_.h.data(), weights_.layers[0].norm, config_.norm_eps, rows(),
                                    config_.d_model, w_.u.data(), stream_));
    for (int32_t layer = 0; layer < config_.layers; ++layer) {
      if (stop()) return absl::CancelledError("stopped between layers");
      RETURN_IF_ERROR(ReadStreams(layer));
      RETURN_IF_ERROR(RunLayer(layer));
    }
    RETURN_IF_ERROR(ReadStreams(config_.layers));
    RETURN_IF_ERROR(w_.records.CopyTo(w_.host_records.data(), record_.size_all(), stream_));
    RETURN_IF_ERROR(RunHead());
    RETURN_IF_ERROR(w_.nonfinite.CopyTo(w_.host_nonfinite.data(), flags(), stream_));
    RETURN_IF_ERROR(w_.stream.Wait());
    Finish();
    return absl::OkStatus();
  }

 private:
  int64_t rows() const { return seq_start_.back(); }
  int64_t sequences() const { return static_cast<int64_t>(pieces_.size()); }
  int64_t flags() const { return (config_.layers + 1) * sequences(); }

  // What the pass will look at, as lists of row numbers.
  void ListRows() {
    const int64_t outputs = config_.outputs();
    for (int32_t s = 0; s < sequences(); ++s) {
      Piece& piece = pieces_[s];
      sequence_of_.insert(sequence_of_.end(), seq_start_[s + 1] - seq_start_[s], s);
      if (piece.trace != nullptr && piece.trace->records_scans) {
        for (int32_t i = seq_start_[s]; i < seq_start_[s + 1]; ++i) traced_.push_back(i);
        checked_channels_ = piece.trace->checked_channels;  // the same of every trace of a model
      }
      if (piece.logits != nullptr) piece.logits->resize(piece.logit_rows.size() * outputs);
      for (size_t k = 0; k < piece.logit_rows.size(); ++k) {
        const int32_t from = config_.mean_pooled() ? s : seq_start_[s] + piece.logit_rows[k];
        wanted_.push_back({from, s, piece.logits->data() + k * outputs});
      }
    }
    record_.count = static_cast<int64_t>(traced_.size());
    record_.width = config_.selective_width();
    record_.checked = static_cast<int64_t>(checked_channels_.size());
    record_.scans = int64_t{config_.layers} * config_.directions();
  }

  absl::Status Reserve() {
    const int64_t rows = Gemm::RowsCovered(this->rows()), d_inner = config_.d_inner;
    const int64_t head_rows =
        Gemm::RowsCovered(std::min(kHeadRows, static_cast<int64_t>(wanted_.size())));
    const auto grow = [&](device::DeviceArray<float>& array, int64_t rows, int64_t cols) {
      return Grow(array, rows * cols);
    };
    RETURN_IF_ERROR(grow(w_.h, rows, config_.d_model));
    RETURN_IF_ERROR(grow(w_.u, rows, config_.d_model));
    RETURN_IF_ERROR(grow(w_.xz, rows, config_.in_proj_rows()));
    RETURN_IF_ERROR(grow(w_.x, rows, config_.conv_channels()));
    if (config_.family != Family::kMamba2) {
      RETURN_IF_ERROR(grow(w_.selective, rows, config_.selective_width()));
      RETURN_IF_ERROR(grow(w_.dt, rows, d_inner));
    }
    RETURN_IF_ERROR(grow(w_.gated, rows, d_inner));
    RETURN_IF_ERROR(grow(w_.out, rows, config_.d_model));
    if (config_.directions() == 2) {
      RETURN_IF_ERROR(grow(w_.flipped_xz, rows, 2 * d_inner));
      RETURN_IF_ERROR(grow(w_.flipped_gated, rows, d_inner));
    }
    if (record_.count > 0) {
      RETURN_IF_ERROR(grow(w_.y, rows, d_inner));
      RETURN_IF_ERROR(Grow(w_.records, record_.size_all()));
      RETURN_IF_ERROR(Grow(w_.host_records, record_.size_all()));
    }
    if (config_.mean_pooled()) RETURN_IF_ERROR(grow(w_.means, sequences(), config_.d_model));
    RETURN_IF_ERROR(grow(w_.head_rows, head_rows, config_.d_model));
    RETURN_IF_ERROR(grow(w_.logits, head_rows, config_.outputs()));
    RETURN_IF_ERROR(Grow(w_.host_logits, head_rows * config_.outputs()));
    RETURN_IF_ERROR(Grow(w_.nonfinite, flags()));
    RETURN_IF_ERROR(Grow(w_.host_nonfinite, flags()));
    return ReserveImagesAndScratch(head_rows);
  }

  absl::Status ReserveImagesAndScratch(int64_t head_rows) {
    int64_t scratch = Gemm::LinearScratchBytes(weights_.head, head_rows);
    const auto used = [&](const WeightMatrix& matrix, int64_t rows) {
      if (matrix.data == nullptr) return;
      scratch = std::max(scratch, Gemm::LinearScratchBytes(matrix, rows));
    };
    for (const LayerWeights& layer : weights_.layers) {
      used(layer.in_proj, rows());
      used(layer.out_proj, rows());
      for (const BranchWeights& branch : layer.branches) {
        used(branch.x_proj, rows());
        used(branch.dt_proj, rows());
      }
    }
    if (config_.family == Family::kVim) {
      const int64_t patches = sequences() * config_.vision.patches();
      const int64_t covered = Gemm::RowsCovered(patches);
      used(weights_.patches.proj, patches);
      RETURN_IF_ERROR(Grow(w_.patches, covered * weights_.patches.proj.cols));
      RETURN_IF_ERROR(Grow(w_.embedded, covered * config_.d_model));
      w_.host_patches.Reserve(patches * weights_.patches.proj.cols);
    }
    return Grow(w_.scratch, scratch);
  }

  // Everything small that the device needs to know, in one copy.
  absl::Status Send() {
    Upload& upload = w_.upload;
    upload.Clear();
    std::vector<int32_t> tokens, head_rows, head_owners;
    std::vector<float*> conv_states, ssm_states;
    std::vector<double*> sums;
    std::vector<int64_t> counts;
    for (const Piece& piece : pieces_) {
      tokens.insert(tokens.end(), piece.tokens.begin(), piece.tokens.end());
      tokens.resize(tokens.size() + piece.embeddings.size() / config_.d_model);
      sums.push_back(StateOf(piece).pooled());
      counts.push_back(piece.state->pooled_tokens + RowsOf(config_, piece));
    }
    for (int64_t scan = 0; scan < record_.scans; ++scan) {
      for (const Piece& piece : pieces_) {
        conv_states.push_back(StateOf(piece).conv_state(scan));
        ssm_states.push_back(StateOf(piece).ssm_state(scan));
      }
    }
    for (const WantedRow& row : wanted_) {
      head_rows.push_back(row.from);
      head_owners.push_back(row.piece);
    }
    const auto tokens_at = upload.Add(tokens), starts_at = upload.Add(seq_start_),
               sequence_of_at = upload.Add(sequence_of_), conv_at = upload.Add(conv_states),
               ssm_at = upload.Add(ssm_states), traced_at = upload.Add(traced_),
               channels_at = upload.Add(checked_channels_), head_rows_at = upload.Add(head_rows),
               head_owners_at = upload.Add(head_owners), sums_at = upload.Add(sums),
               counts_at = upload.Add(counts);
    RETURN_IF_ERROR(upload.Send(stream_));
    tokens_ = upload.At<int32_t>(tokens_at);

    head_rows_ = upload.At<int32_t>(head_rows_at);
    head_owners_ = upload.At<int32_t>(head_owners_at);
    sums_ = upload.At<double*>(sums_at);
    counts_ = upload.At<int64_t>(counts_at);
    sent_.sequences = sequences();
    sent_.tokens = rows();
    sent_.seq_start = upload.At<int32_t>(starts_at);
    sent_.sequence_of = upload.At<int32_t>(sequence_of_at);
    sent_.conv_states = upload.At<float*>(conv_at);
    sent_.ssm_states = upload.At<float*>(ssm_at);
    sent_.traced = upload.At<int32_t>(traced_at);
    sent_.checked_channels = upload.At<int32_t>(channels_at);
    return w_.nonfinite.Zero(stream_);
  }

  // Pieces that bring what enters the first layer: over what the lookup left in their rows. Vim's
  // do all or none.
  absl::Status PlaceEmbeddings() {
    const int64_t d_model = config_.d_model;
    for (int64_t s = 0; s < sequences(); ++s) {
      const std::span<const float> rows = pieces_[s].embeddings;
      MS_CHECK(config_.family != Family::kVim || rows.empty() == pieces_[0].embeddings.empty());
      if (rows.empty()) continue;
      RETURN_IF_ERROR(w_.h.CopyFrom(rows.data(), static_cast<int64_t>(rows.size()), stream_,
                                    seq_start_[s] * d_model));
    }
    return absl::OkStatus();
  }

  // Into the traces that keep it: the stream that enters layer `layer`.
  absl::Status ReadStreams(int32_t layer) {
    const int64_t d_model = config_.d_model;
    for (int64_t s = 0; s < sequences(); ++s) {
      SequenceTrace* trace = pieces_[s].trace;
      float* to = trace == nullptr ? nullptr : trace->stream(layer);
      if (to == nullptr) continue;
      RETURN_IF_ERROR(w_.h.CopyTo(to + trace->tokens * d_model,
                                  (seq_start_[s + 1] - seq_start_[s]) * d_model, stream_,
                                  seq_start_[s] * d_model));
    }
    return absl::OkStatus();
  }

  absl::Status EmbedTokens() {
    const WeightMatrix& table = weights_.embeddings;
    if (table.type == ElementType::kBF16) {
      return device::GatherRows(static_cast<const device::Bf16*>(table.data), tokens_, rows(),
                                config_.d_model, w_.h.data(), stream_);
    }
    return device::GatherRows(static_cast<const float*>(table.data), tokens_, rows(),
                              config_.d_model, w_.h.data(), stream_);
  }

  absl::Status EmbedImages() {
    const VisionConfig& vision = config_.vision;
    const PatchWeights& patches = weights_.patches;
    const int64_t pixels = patches.proj.cols, of_image = vision.patches() * pixels;
    pool_.Split(sequences(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        CopyPatches(vision, pieces_[s].image, w_.host_patches.data() + s * of_image);
      }
    });
    RETURN_IF_ERROR(w_.patches.CopyFrom(w_.host_patches.data(), sequences() * of_image, stream_));
    RETURN_IF_ERROR(w_.gemm.Linear(w_.patches.data(), pixels, sequences() * vision.patches(),
                                   patches.proj, patches.proj_bias, w_.embedded.data(),
                                   config_.d_model, w_.scratch.data(), stream_));
    device::ImageTokens tokens;
    tokens.images = sequences();
    tokens.tokens = vision.tokens();
    tokens.class_position = vision.class_position();
    tokens.cols = config_.d_model;
    tokens.patches = w_.embedded.data();
    tokens.cls_token = patches.cls_token;
    tokens.pos_embed = patches.pos_embed;
    return device::PlaceImageTokens(tokens, w_.h.data(), stream_);
  }

  // From w_.u, the layer's normalised input, to the next layer's; h += mixer(u).
  absl::Status RunLayer(int32_t layer) {
    const LayerWeights& weights = weights_.layers[layer];
    const int64_t d_model = config_.d_model, d_inner = config_.d_inner;
    const int64_t wide = config_.in_proj_rows();
    RETURN_IF_ERROR(w_.gemm.Linear(w_.u.data(), d_model, rows(), weights.in_proj,
                                   weights.in_proj_bias, w_.xz.data(), wide, w_.scratch.data(),
                                   stream_));
    RETURN_IF_ERROR(RunMixer({config_, weights, layer, sent_, record_, w_}));
    RETURN_IF_ERROR(w_.gemm.Linear(w_.gated.data(), d_inner, rows(), weights.out_proj,
                                   weights.out_proj_bias, w_.out.data(), d_model, w_.scratch.data(),
                                   stream_));
    if (layer + 1 < config_.layers) {
      RETURN_IF_ERROR(device::AddRmsNorm(w_.out.data(), weights_.layers[layer + 1].norm,
                                         config_.norm_eps, rows(), d_model, w_.h.data(),
                                         w_.u.data(), stream_));
    } else {
      RETURN_IF_ERROR(device::AddInPlace(w_.out.data(), rows() * d_model, w_.h.data(), stream_));
    }
    return device::FlagNonFinite(w_.h.data(), rows(), d_model, sent_.sequence_of,
                                 w_.nonfinite.data() + layer * sequences(), stream_);
  }

  // Final norm and head on the wanted rows; with pooling on the means of all pieces.
  absl::Status RunHead() {
    const int64_t d_model = config_.d_model;
    const float* source = w_.h.data();
    if (config_.mean_pooled()) {
      RETURN_IF_ERROR(device::RmsNorm(w_.h.data(), weights_.norm_f, config_.norm_eps, rows(),
                                      d_model, w_.u.data(), stream_));
      RETURN_IF_ERROR(device::PoolMeans(w_.u.data(), d_model, sequences(), sent_.seq_start, sums_,
                                        counts_, w_.means.data(), stream_));
      source = w_.means.data();
    }
    const int64_t wanted = static_cast<int64_t>(wanted_.size()), outputs = config_.outputs();
    for (int64_t first = 0; first < wanted; first += kHeadRows) {
      const int64_t count = std::min(kHeadRows, wanted - first);
      float* gathered = w_.head_rows.data();
      RETURN_IF_ERROR(
          device::GatherRows(source, head_rows_ + first, count, d_model, gathered, stream_));
      if (!config_.mean_pooled()) {
        RETURN_IF_ERROR(device::RmsNorm(gathered, weights_.norm_f, config_.norm_eps, count, d_model,
                                        gathered, stream_));
      }
      RETURN_IF_ERROR(w_.gemm.Linear(gathered, d_model, count, weights_.head, weights_.head_bias,
                                     w_.logits.data(), outputs, w_.scratch.data(), stream_));
      RETURN_IF_ERROR(device::FlagNonFinite(w_.logits.data(), count, outputs, head_owners_ + first,
                                            w_.nonfinite.data() + config_.layers * sequences(),
                                            stream_));
      RETURN_IF_ERROR(w_.logits.CopyTo(w_.host_logits.data(), count * outputs, stream_));
      RETURN_IF_ERROR(w_.stream.Wait());
      pool_.Split(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) {
          std::copy_n(w_.host_logits.data() + k * outputs, outputs, wanted_[first + k].to);
        }
      });
    }
    return absl::OkStatus();
  }

  // All is on the host: into the pieces with it.
  void Finish() {
    for (int64_t s = 0; s < sequences(); ++s) {
      Piece& piece = pieces_[s];
      for (int32_t layer = config_.layers; layer >= 0; --layer) {
        if (w_.host_nonfinite.data()[layer * sequences() + s] != 0) piece.nonfinite_layer = layer;
      }
      if (config_.mean_pooled()) piece.state->pooled_tokens += RowsOf(config_, piece);
    }
    if (record_.count > 0) {
      pool_.Split(record_.scans, 1, [&](int64_t begin, int64_t end) {
        for (int64_t scan = begin; scan < end; ++scan) FillTraces(scan);
      });
    }
    for (Piece& piece : pieces_) {
      if (piece.trace != nullptr) piece.trace->tokens += RowsOf(config_, piece);
    }
  }

  // The records of a scan hold the traced pieces' rows, one piece after the other.
  void FillTraces(int64_t scan) {
    const float* base = w_.host_records.data();
    const float* selective = base + record_.selective(scan);
    const float* x = base + record_.x_checked(scan);
    const float* y = base + record_.y_checked(scan);
    for (const Piece& piece : pieces_) {
      if (piece.trace == nullptr || !piece.trace->records_scans) continue;
      LayerTrace& trace = piece.trace->layers[scan];
      const int64_t filled = piece.trace->tokens, rows = RowsOf(config_, piece);
      const int64_t width = record_.width, checked = record_.checked;
      selective += Append(selective, rows * width, trace.selective.data() + filled * width);
      x += Append(x, rows * checked, trace.x_checked.data() + filled * checked);
      y += Append(y, rows * checked, trace.y_checked.data() + filled * checked);
    }
  }

  static int64_t Append(const float* from, int64_t count, float* to) {
    std::copy_n(from, count, to);
    return count;
  }

  const ModelConfig& config_;
  const WeightViews& weights_;
  ThreadPool& pool_;
  PassWorkspace& w_;
  const std::span<Piece> pieces_;
  const std::span<const int32_t> seq_start_;
  const cudaStream_t stream_;

  // On the host.
  std::vector<int32_t> sequence_of_;  // [rows]
  std::vector<int32_t> traced_;       // rows of pieces with a trace
  std::vector<int32_t> checked_channels_;
  std::vector<WantedRow> wanted_;
  RecordLayout record_;

  // On the device.
  SentPieces sent_;
  const int32_t* tokens_ = nullptr;
  const int32_t *head_rows_ = nullptr, *head_owners_ = nullptr;  // [wanted]
  double* const* sums_ = nullptr;                                // [sequences]
  const int64_t* counts_ = nullptr;                              // [sequences]
};

}  // namespace

absl::Status RunPass(const ModelConfig& config, const WeightViews& weights, ThreadPool& pool,
                     PassWorkspace& workspace, std::span<Piece> pieces,
                     std::span<const int32_t> seq_start, absl::FunctionRef<bool()> stop) {
  const absl::Status status = Pass(config, weights, pool, workspace, pieces, seq_start).Run(stop);
  if (status.ok()) return status;
  // What was started still reads the pieces' states and the workspace.
  const absl::Status rest = workspace.stream.Wait();
  return absl::IsCancelled(status) && !rest.ok() ? rest : status;
}

}  // namespace mambascope::model::cuda
