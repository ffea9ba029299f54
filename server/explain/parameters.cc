// The selective parameters as they are (methods.md, section 2): delta, B, C and the decay from what
// the trace kept, the gate from the layer's in_proj, the state by running the scan up to it.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/explain/layer_attention.h"
#include "server/explain/method.h"
#include "server/explain/options.h"
#include "server/explain/reconstruction.h"
#include "server/explain/state_scan.h"
#include "server/explain/stream_steps.h"
#include "server/explain/target_row.h"
#include "server/model/stream_walk.h"

namespace mambascope::explain {
namespace {

using Options = v1::Parameters;
using Direction = v1::HiddenAttention::Direction;

constexpr int64_t kSliceFloats = int64_t{1} << 20;

const char* NameOf(int kind) {
  switch (kind) {
    case Options::KIND_DELTA:
      return "delta";
    case Options::KIND_B:
      return "B";
    case Options::KIND_C:
      return "C";
    case Options::KIND_DECAY:
      return "decay";
    case Options::KIND_GATE:
      return "gate";
    default:
      return "state";
  }
}
bool OfMaps(int kind) { return kind == Options::KIND_DELTA || kind == Options::KIND_DECAY; }
bool OfGroups(int kind) { return kind == Options::KIND_B || kind == Options::KIND_C; }
bool NeedsStream(int kind) { return kind == Options::KIND_GATE || kind == Options::KIND_STATE; }

// What the options come to for a model and an input.
struct Setup {
  Setup(const v1::Explanation& explanation, const model::ModelConfig& model, int64_t length,
        const TargetRow& row)
      : config(model), tokens(length), target(row) {
    const Options& options = explanation.parameters();
    kinds.assign(options.kinds().begin(), options.kinds().end());
    layers = LayersOf(options.layers(), config);
    asked.assign(options.positions().begin(), options.positions().end());
    channels.assign(options.channels().begin(), options.channels().end());
    direction = options.direction() == v1::HiddenAttention::DIRECTION_BACKWARD ? 1 : 0;
    for (const int kind : kinds) {
      streams = streams || NeedsStream(kind);
      for (const int32_t position : Positions(kind)) {
        prefix = std::max<int64_t>(prefix, position + 1);
      }
    }
    prefix = config.directions() == 2 ? tokens : std::max(prefix, target.prefix);
  }

  std::vector<int32_t> Positions(int kind) const {
    if (!asked.empty()) return asked;
    if (kind == Options::KIND_STATE) return {static_cast<int32_t>(target.position)};
    return Indices(tokens);
  }
  std::vector<int32_t> Channels(int kind) const {
    if (OfGroups(kind)) return Indices(config.groups);
    if (!channels.empty()) return channels;
    return Indices(OfMaps(kind) ? config.maps() : config.d_inner);
  }
  bool ByState(int kind) const {
    const bool decays = kind == Options::KIND_DECAY && config.family != model::Family::kMamba2;
    return OfGroups(kind) || kind == Options::KIND_STATE || decays;
  }
  // Numbers of one position and channel.
  int64_t States(int kind) const { return ByState(kind) ? config.d_state : 1; }
  int64_t RowFloats(int kind) const {
    return static_cast<int64_t>(Channels(kind).size()) * States(kind);
  }
  int64_t RowsPerStep(int kind) const {
    return std::max<int64_t>(kSliceFloats / RowFloats(kind), 1);
  }
  // Where a token stands in the scan's own order.
  int64_t Place(int64_t token) const { return direction == 0 ? token : tokens - 1 - token; }
  // The state's positions as the scan meets them, and where each stands among those asked for.
  std::vector<std::pair<int64_t, int64_t>> Stops() const {
    std::vector<std::pair<int64_t, int64_t>> stops;
    for (const int32_t position : Positions(Options::KIND_STATE)) {
      stops.emplace_back(Place(position), static_cast<int64_t>(stops.size()));
    }
    std::sort(stops.begin(), stops.end());
    return stops;
  }
  int64_t Steps(int kind) const {
    if (kind == Options::KIND_STATE) return static_cast<int64_t>(StateSteps().size());
    const auto rows = static_cast<int64_t>(Positions(kind).size());
    return (rows + RowsPerStep(kind) - 1) / RowsPerStep(kind);
  }
  // Tokens that the scan has read after each step.
  std::vector<int64_t> StateSteps() const {
    std::vector<int64_t> steps;
    const int64_t most = StateScan::SliceTokens(config), rows = RowsPerStep(Options::KIND_STATE);
    int64_t reached = 0, stops = 0;
    for (const auto& [place, index] : Stops()) {
      for (; place + 1 - reached > most; stops = 0) steps.push_back(reached += most);
      if (++stops < rows) continue;
      steps.push_back(reached = place + 1);
      stops = 0;
    }
    const int64_t last = Stops().back().first + 1;
    if (steps.empty() || steps.back() < last) steps.push_back(last);
    return steps;
  }
  int64_t StepsPerLayer() const {
    int64_t steps = 1;
    for (const int kind : kinds) steps += Steps(kind);
    return steps;
  }
  std::vector<int32_t> Preparing() const {
    return streams ? StreamSteps(config, layers, tokens) : std::vector<int32_t>(layers.size(), 0);
  }
  LayerAttention Attention() const {
    const Direction one = direction == 1 ? v1::HiddenAttention::DIRECTION_BACKWARD
                                         : v1::HiddenAttention::DIRECTION_FORWARD;
    return LayerAttention({}, LayerAttention::Want::kRow, /*relu=*/false, config, tokens, prefix,
                          target.spread, one);
  }

  const model::ModelConfig& config;
  int64_t tokens;
  TargetRow target;
  std::vector<int> kinds;
  std::vector<int32_t> layers, asked, channels;
  int32_t direction = 0;
  bool streams = false;
  int64_t prefix = 0;  // tokens that are read
};

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
  bool Supports(const model::ModelConfig& /*config*/) const override { return true; }

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
    plan.slices = static_cast<int32_t>(preparing + layers * setup.StepsPerLayer());
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
