// The selective parameters as they are (methods.md, section 2): delta, B, C and the decay from what
// the trace kept, the gate from the layer's in_proj, the state by running the scan up to it.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/explain/method.h"
#include "server/explain/parameters_setup.h"
#include "server/explain/reconstruction.h"
#include "server/model/stream_walk.h"

namespace mambascope::explain {
namespace {

using Options = v1::Parameters;
using Direction = v1::HiddenAttention::Direction;
using Setup = ParametersSetup;

class Explainer : public Explaining {
 public:
  Explainer(const v1::Explanation& options, const Subject& subject)
      : subject_(subject),
        setup_(options, subject.model->config(), subject.tokens, TargetRow(options, subject)),
        weights_(RowWeights(subject)),
        attention_(setup_.Attention()),
        reconstruction_(subject),
        preparing_(setup_.Preparing()),
        state_(setup_.config, setup_.direction) {
    weights_.resize(setup_.prefix);
    if (setup_.streams) {
      walk_ = std::make_unique<model::StreamWalk>(*subject.model, *subject.trace, setup_.prefix);
    }
  }

  absl::Status Step(TensorWriter& writer) override {
    const int32_t layer = setup_.layers[done_];
    int64_t step = next_++ - preparing_[done_];
    if (step < 0) {
      walk_->Prepare(*subject_.pool, layer);
      return absl::OkStatus();
    }
    if (step == 0) {
      Open(layer);
    } else {
      --step;
      for (const int kind : setup_.kinds) {
        if (step < setup_.Steps(kind)) {
          RETURN_IF_ERROR(kind == Options::KIND_STATE ? StateStep(layer, step, writer)
                                                      : Rows(layer, kind, step, writer));
          break;
        }
        step -= setup_.Steps(kind);
      }
    }
    if (next_ < preparing_[done_] + setup_.StepsPerLayer()) return absl::OkStatus();
    reconstruction_.CheckRow(layer, setup_.target, weights_, attention_);
    ++done_;
    next_ = 0;
    return absl::OkStatus();
  }

  v1::Quality quality() const override {
    v1::Quality quality;
    reconstruction_.Report(&quality);
    return quality;
  }

 private:
  void Open(int32_t layer) {
    attention_.Open(subject_, layer);
    if (!setup_.streams) return;
    while (!walk_->Prepare(*subject_.pool, layer)) {
    }
    model::RunLayerOnce(*subject_.pool, *subject_.model, layer, walk_->Entering(layer),
                        setup_.prefix, model::LayerParts::kConvolution, activations_);
  }

  // Some positions' numbers.
  absl::Status Rows(int32_t layer, int kind, int64_t step, TensorWriter& writer) {
    const std::vector<int32_t> positions = setup_.Positions(kind), channels = setup_.Channels(kind);
    const int64_t begin = step * setup_.RowsPerStep(kind), width = setup_.RowFloats(kind);
    const int64_t end =
        std::min(begin + setup_.RowsPerStep(kind), static_cast<int64_t>(positions.size()));
    values_.resize((end - begin) * width);
    subject_.pool->Split(end - begin, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        FillRow(kind, positions[begin + row], channels, values_.data() + row * width);
      }
    });
    RETURN_IF_ERROR(CheckFinite("parameters", layer, values_));
    writer.Write(NameOf(kind), std::span<const float>(values_));
    return absl::OkStatus();
  }

  void FillRow(int kind, int64_t position, std::span<const int32_t> channels, float* out) const {
    const kernels::ScanParameters& scan = attention_.scan(setup_.direction);
    const int64_t i = setup_.Place(position), states = setup_.States(kind);
    const model::InProjLayout layout = model::InProjLayoutOf(setup_.config);
    for (const int32_t channel : channels) {
      for (int64_t n = 0; n < states; ++n) {
        if (OfGroups(kind)) {  // the channel is a group
          const float* values = (kind == Options::KIND_B ? scan.B : scan.C) + i * scan.bc_stride;
          *out++ = values[channel * scan.d_state + n];
        } else if (kind == Options::KIND_DELTA) {
          *out++ = scan.delta[i * scan.d_inner + channel];
        } else if (kind == Options::KIND_DECAY) {
          *out++ =
              std::exp(scan.delta[i * scan.d_inner + channel] * scan.A[n * scan.d_inner + channel]);
        } else {
          const float z = activations_.in[position * layout.stride + layout.z + channel];
          *out++ = z / (1 + std::exp(-z));
        }
      }
    }
  }

  // The scan goes on to the step's end and leaves the states asked for on its way. They are kept
  // until they come in the order asked for.
  absl::Status StateStep(int32_t layer, int64_t step, TensorWriter& writer) {
    if (step == 0) {
      state_.Begin(subject_, layer, activations_);
      stops_ = setup_.Stops();
      stop_ = 0;
      in_order_ = std::is_sorted(stops_.begin(), stops_.end(),
                                 [](const auto& a, const auto& b) { return a.second < b.second; });
      states_.resize(in_order_ ? 0 : stops_.size() * setup_.RowFloats(Options::KIND_STATE));
    }
    const std::vector<int64_t> steps = setup_.StateSteps();
    const std::vector<int32_t> channels = setup_.Channels(Options::KIND_STATE);
    const int64_t width = setup_.RowFloats(Options::KIND_STATE);
    if (in_order_) states_.clear();
    for (; stop_ < stops_.size() && stops_[stop_].first < steps[step]; ++stop_) {
      state_.Advance(stops_[stop_].first + 1);
      if (in_order_) states_.resize(states_.size() + width);
      float* out = in_order_ ? states_.data() + states_.size() - width
                             : states_.data() + stops_[stop_].second * width;
      for (const int32_t channel : channels) {
        for (int32_t n = 0; n < setup_.config.d_state; ++n) *out++ = state_.At(channel, n);
      }
    }
    state_.Advance(steps[step]);
    if (!in_order_ && stop_ < stops_.size()) return absl::OkStatus();
    RETURN_IF_ERROR(CheckFinite("parameters", layer, states_));
    writer.Write("state", std::span<const float>(states_));
    return absl::OkStatus();
  }

  const Subject subject_;
  const Setup setup_;
  std::vector<float> weights_;
  LayerAttention attention_;
  Reconstruction reconstruction_;
  const std::vector<int32_t> preparing_;  // steps before each layer
  std::unique_ptr<model::StreamWalk> walk_;
  model::LayerActivations activations_;
  StateScan state_;
  size_t done_ = 0;   // layers
  int64_t next_ = 0;  // step of the layer
  std::vector<float> values_, states_;
  std::vector<std::pair<int64_t, int64_t>> stops_;
  size_t stop_ = 0;
  bool in_order_ = true;
};

class Parameters : public Method {
 public:
  absl::string_view name() const override { return "parameters"; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, const std::string& field, Violations& violations) const override {
    const Options& options = explanation.parameters();
    CheckKinds(options, field, violations);
    CheckLayers(options.layers(), config, field, violations);
    CheckIndices(options.positions(), static_cast<int32_t>(tokens), static_cast<int32_t>(tokens),
                 field + ".positions", violations);
    bool by_map = false, by_group = !options.kinds().empty();
    for (const int kind : options.kinds()) {
      by_map = by_map || OfMaps(kind);
      by_group = by_group && OfGroups(kind);
    }
    const int32_t limit = by_map ? config.maps() : config.d_inner;
    CheckIndices(options.channels(), limit, limit, field + ".channels", violations);
    if (by_group && !options.channels().empty()) {
      violations.Add(field + ".channels", "is not for KIND_B and KIND_C, which have none");
    }
    CheckDirection(options.direction(), config, field, violations);
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const Setup setup(explanation, config, tokens, TargetRow(explanation, config, tokens));
    const LayerAttention attention = setup.Attention();
    const std::vector<int32_t> steps = setup.Preparing();
    const auto layers = static_cast<int64_t>(setup.layers.size());
    const int64_t preparing = std::accumulate(steps.begin(), steps.end(), int64_t{0});
    Plan plan;
    for (const int kind : setup.kinds) {
      plan.tensors.push_back(MakeTensorInfo(NameOf(kind), Axes(setup, kind), dtype));
    }
    plan.streams = setup.streams;
    plan.slices = preparing + layers * setup.StepsPerLayer();
    plan.memory_bytes = MemoryBytes(setup, attention);
    plan.work = static_cast<double>(layers) * Reconstruction::RowWork(config, setup.prefix);
    if (setup.streams) {
      plan.work.forward_tokens = static_cast<double>((preparing + layers) * setup.prefix) /
                                 static_cast<double>(config.layers);
    }
    if (std::count(setup.kinds.begin(), setup.kinds.end(), Options::KIND_STATE) > 0) {
      plan.work.scan +=
          static_cast<double>(layers * setup.StateSteps().back()) * config.d_inner * config.d_state;
    }
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                    const Subject& subject) const override {
    return std::make_unique<Explainer>(options, subject);
  }

 private:
  static void CheckKinds(const Options& options, const std::string& field, Violations& violations) {
    constexpr int kMostKinds = 6;
    if (options.kinds().empty()) {
      violations.Add(field + ".kinds", "is empty, at least 1 must be named");
    }
    if (options.kinds_size() > kMostKinds) {
      violations.Add(field + ".kinds",
                     absl::StrCat(options.kinds_size(), " are more than ", kMostKinds));
    }
    for (int i = 0; i < std::min(options.kinds_size(), kMostKinds); ++i) {
      const int kind = options.kinds(i);
      const std::string path = absl::StrCat(field, ".kinds[", i, "]");
      CheckEnum(Options::Kind_IsValid(kind) && kind != Options::KIND_UNSPECIFIED, kind, path,
                violations);
      for (int earlier = 0; earlier < i; ++earlier) {
        if (options.kinds(earlier) != kind) continue;
        violations.Add(path, absl::StrCat(kind, " repeats entry ", earlier));
        break;
      }
    }
  }

  static void CheckDirection(Direction direction, const model::ModelConfig& config,
                             const std::string& field, Violations& violations) {
    if (!CheckEnum(v1::HiddenAttention::Direction_IsValid(direction), direction,
                   field + ".direction", violations)) {
      return;
    }
    if (direction == v1::HiddenAttention::DIRECTION_BOTH) {
      violations.Add(field + ".direction", "DIRECTION_BOTH: parameters belong to one scan");
    } else if (config.directions() == 1 &&
               direction != v1::HiddenAttention::DIRECTION_UNSPECIFIED) {
      violations.Add(field + ".direction",
                     absl::StrCat(v1::HiddenAttention::Direction_Name(direction),
                                  " is for models with two scans only"));
    }
  }

  static std::vector<Axis> Axes(const Setup& setup, int kind) {
    const std::vector<int32_t> positions = setup.Positions(kind), channels = setup.Channels(kind);
    std::vector<Axis> axes = {
        {"layers", static_cast<int64_t>(setup.layers.size()), setup.layers},
        {"positions", static_cast<int64_t>(positions.size()), positions},
        {OfGroups(kind) ? "groups" : "channels", static_cast<int64_t>(channels.size()), channels}};
    if (setup.ByState(kind)) axes.push_back({"states", setup.config.d_state, {}});
    return axes;
  }

  static int64_t MemoryBytes(const Setup& setup, const LayerAttention& attention) {
    int64_t floats = 2 * setup.tokens, states = 0;
    for (const int kind : setup.kinds) {
      const auto rows = static_cast<int64_t>(setup.Positions(kind).size());
      const auto stops = setup.Stops();
      const bool kept =
          kind == Options::KIND_STATE &&
          !std::is_sorted(stops.begin(), stops.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; });
      const int64_t held = kept ? rows : std::min(rows, setup.RowsPerStep(kind));
      if (kind == Options::KIND_STATE) {
        // Doubled where it grows by and by.
        states = (kept ? 1 : 3) * held * setup.RowFloats(kind) + 8 * rows;
      } else {
        floats = std::max(floats, 2 * setup.tokens + held * setup.RowFloats(kind) + 3 * rows);
      }
    }
    int64_t bytes = attention.memory_bytes() + 4 * (floats + states) +
                    Reconstruction::MemoryBytes(setup.config, setup.prefix);
    if (!setup.streams) return bytes;
    bytes += model::LayerActivationsBytes(setup.config, setup.prefix) +
             model::StreamWalk::MemoryBytes(
                 setup.config, setup.prefix,
                 model::SequenceTrace::StreamStride(setup.config, setup.tokens));
    return bytes + (states > 0 ? StateScan::MemoryBytes(setup.config) : 0);
  }
};

}  // namespace

std::unique_ptr<const Method> NewParameters() { return std::make_unique<Parameters>(); }

}  // namespace mambascope::explain
