// The maps themselves: each layer's hidden attention, reduced, by channel, by state, or in its
// factors (methods.md, section 2; The Hidden Attention of Mamba Models, arXiv 2403.01590).
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "server/base/status.h"
#include "server/explain/layer_attention.h"
#include "server/explain/method.h"
#include "server/explain/options.h"
#include "server/explain/reconstruction.h"

namespace mambascope::explain {
namespace {

constexpr absl::string_view kName = "hidden_attention";
constexpr int32_t kMostChannels = 64;

// Single maps are many and cheap: a slice brings this many numbers of them, or one map.
constexpr int64_t kSliceFloats = int64_t{1} << 20;

bool IsFactor(v1::Part part) {
  return part == v1::PART_STATE || part == v1::PART_Q || part == v1::PART_K || part == v1::PART_H;
}
bool IsPerToken(v1::Part part) { return part == v1::PART_Q || part == v1::PART_K; }

// What the options come to for a model and an input.
struct Setup {
  // How the layer's numbers are made.
  enum class Kind {
    kReduced,   // one map or row, from LayerAttention
    kChannels,  // maps of channels
    kInner,     // maps of channels and states: STATE and H
    kPerToken,  // Q and K
  };

  Setup(const v1::Explanation& explanation, const model::ModelConfig& model, int64_t length)
      : config(model), tokens(length) {
    const v1::HiddenAttention& options = explanation.hidden_attention();
    layers = LayersOf(options.layers(), config);
    part = options.part() == v1::PART_UNSPECIFIED ? v1::PART_ALPHA : options.part();
    target = PositionOf(explanation, config, tokens);
    all_rows = options.rows() != v1::ROWS_TARGET;
    prefix = all_rows ? tokens : target + 1;
    reduction = MakeReduction(IsFactor(part) ? v1::REDUCTION_CHANNELS : options.reduction(),
                              options.channels(), options.top_k(), config);
    states.assign(options.states().begin(), options.states().end());
    if (states.empty()) states = Indices(config.d_state);
    kind = IsPerToken(part)                          ? Kind::kPerToken
           : IsFactor(part)                          ? Kind::kInner
           : reduction.how == v1::REDUCTION_CHANNELS ? Kind::kChannels
                                                     : Kind::kReduced;
  }

  const std::vector<int32_t>& channels() const { return reduction.channels; }
  LayerAttention Attention() const {
    const bool maps = all_rows && kind == Kind::kReduced;
    return LayerAttention(reduction, maps ? LayerAttention::Want::kMap : LayerAttention::Want::kRow,
                          part == v1::PART_RELU, config, tokens, prefix);
  }
  // Maps, rows or blocks of tokens of one layer, and how many of them a slice makes.
  int64_t units() const {
    if (kind == Kind::kPerToken) return tokens;
    const auto count = static_cast<int64_t>(channels().size());
    return kind == Kind::kInner ? count * static_cast<int64_t>(states.size()) : count;
  }
  int64_t unit_floats() const {
    if (kind == Kind::kPerToken) return static_cast<int64_t>(channels().size()) * config.d_state;
    return all_rows ? tokens * tokens : tokens;
  }
  int64_t units_per_step() const {
    return std::clamp<int64_t>(kSliceFloats / unit_floats(), 1, units());
  }
  int64_t steps_per_layer(const LayerAttention& attention) const {
    if (kind == Kind::kReduced) return attention.rank_pieces() + attention.pieces();
    return (units() + units_per_step() - 1) / units_per_step();
  }

  const model::ModelConfig& config;
  int64_t tokens, target, prefix;
  std::vector<int32_t> layers, states;
  v1::Part part;
  bool all_rows;
  ChannelReduction reduction;
  Kind kind;
};

class Explainer : public Explaining {
 public:
  Explainer(const v1::Explanation& options, const Subject& subject)
      : subject_(subject),
        setup_(options, subject.model->config(), subject.tokens),
        attention_(setup_.Attention()),
        reconstruction_(subject),
        steps_(setup_.steps_per_layer(attention_)) {}

  absl::Status Step(TensorWriter& writer) override {
    const int64_t step = next_ % steps_;
    MS_CHECK(next_ / steps_ < static_cast<int64_t>(setup_.layers.size()));
    layer_ = setup_.layers[next_ / steps_];
    ++next_;
    if (step == 0) attention_.Open(subject_, layer_);
    switch (setup_.kind) {
      case Setup::Kind::kReduced:
        RETURN_IF_ERROR(Reduced(step, writer));
        break;
      case Setup::Kind::kChannels:
      case Setup::Kind::kInner:
      case Setup::Kind::kPerToken: {
        const int64_t begin = step * setup_.units_per_step();
        const int64_t end = std::min(begin + setup_.units_per_step(), setup_.units());
        values_.Reserve(setup_.units_per_step() * setup_.unit_floats());
        if (setup_.kind == Setup::Kind::kPerToken) {
          FillTokens(begin, end);
        } else if (setup_.all_rows) {
          FillMaps(begin, end);
        } else {
          FillRows(begin, end);
        }
        const std::span<const float> made(values_.data(), (end - begin) * setup_.unit_floats());
        RETURN_IF_ERROR(CheckFinite(kName, layer_, made));
        writer.Write(kName, made);
        break;
      }
    }
    if (step + 1 == steps_) CheckLayer();
    return absl::OkStatus();
  }

  v1::Quality quality() const override {
    v1::Quality quality;
    reconstruction_.Report(&quality);
    return quality;
  }

 private:
  absl::Status Reduced(int64_t step, TensorWriter& writer) {
    if (step == 0) {
      if (setup_.all_rows) {
        values_.Reserve(setup_.tokens * setup_.tokens);
      } else {
        row_.assign(setup_.prefix, 0);
      }
    }
    const int64_t piece = step - attention_.rank_pieces();
    if (piece < 0) {
      attention_.Rank(step);
    } else if (setup_.all_rows) {
      attention_.AddMap(piece, values_.data());
    } else {
      attention_.AddRow(piece, setup_.target, row_);
    }
    if (step + 1 < steps_) return absl::OkStatus();
    if (setup_.all_rows) {
      const std::span<const float> map(values_.data(), setup_.tokens * setup_.tokens);
      RETURN_IF_ERROR(CheckFinite(kName, layer_, map));
      writer.Write(kName, map);
    } else {
      const std::vector<float> row(row_.begin(), row_.end());
      RETURN_IF_ERROR(CheckFinite(kName, layer_, row));
      WriteRow(writer, kName, row, setup_.tokens);
    }
    if (setup_.reduction.how == v1::REDUCTION_TOP_K) {
      writer.Write("indices", attention_.channels());
    }
    return absl::OkStatus();
  }

  // Calls make(channel, its states) for every channel among the units [begin, end).
  template <class Make>
  void ForEachChannel(int64_t begin, int64_t end, const Make& make) {
    const auto states = static_cast<int64_t>(setup_.states.size());
    for (int64_t unit = begin; unit < end;) {
      const int64_t first = unit % states, count = std::min(states - first, end - unit);
      make(setup_.channels()[unit / states],
           std::span<const int32_t>(setup_.states).subspan(first, count));
      unit += count;
    }
  }

  // Maps or rows of channels of one group at a time: calls make(channels, index of the first).
  template <class Make>
  void ForEachGroup(int64_t begin, int64_t end, const Make& make) {
    const std::span<const int32_t> channels(setup_.channels());
    for (int64_t first = begin, last = begin; first < end; first = last) {
      const int64_t group = attention_.group_of(channels[first]);
      while (last < end && attention_.group_of(channels[last]) == group) ++last;
      make(channels.subspan(first, last - first), first - begin);
    }
  }

  void FillMaps(int64_t begin, int64_t end) {
    const int64_t size = setup_.tokens * setup_.tokens;
    if (setup_.kind == Setup::Kind::kChannels) {
      ForEachGroup(begin, end, [&](std::span<const int32_t> channels, int64_t first) {
        const kernels::ScanParameters scan = attention_.Channels(channels);
        kernels::ChannelMaps(*subject_.pool, scan, Indices(scan.d_inner),
                             values_.data() + first * size);
      });
      return;
    }
    float* maps = values_.data();
    ForEachChannel(begin, end, [&](int32_t channel, std::span<const int32_t> states) {
      const std::array<int32_t, 1> one = {channel};
      (setup_.part == v1::PART_STATE ? kernels::StateMaps : kernels::DecayMaps)(
          *subject_.pool, attention_.Channels(one), 0, states, maps);
      maps += static_cast<int64_t>(states.size()) * size;
    });
  }

  // Rows of `tokens` values that end with the target's and go on with zeros.
  void FillRows(int64_t begin, int64_t end) {
    std::fill_n(values_.data(), (end - begin) * setup_.tokens, 0.0f);
    if (setup_.kind == Setup::Kind::kChannels) {
      ForEachGroup(begin, end, [&](std::span<const int32_t> channels, int64_t first) {
        const kernels::ScanParameters scan = attention_.Channels(channels);
        rows_.Reserve(setup_.prefix * scan.d_inner);
        kernels::TargetRows(*subject_.pool, scan, setup_.target, false, rows_.data());
        for (int64_t j = 0; j < setup_.prefix; ++j) {
          for (int64_t c = 0; c < scan.d_inner; ++c) {
            values_[(first + c) * setup_.tokens + j] = rows_[j * scan.d_inner + c];
          }
        }
      });
      return;
    }
    float* rows = values_.data();
    ForEachChannel(begin, end, [&](int32_t channel, std::span<const int32_t> states) {
      subject_.pool->Run(static_cast<int64_t>(states.size()), [&](int64_t s) {
        InnerRow(channel, states[s], rows + s * setup_.tokens);
      });
      rows += static_cast<int64_t>(states.size()) * setup_.tokens;
    });
  }

  // The target's row of one state of one channel: the adjoint recurrence with one state.
  void InnerRow(int32_t channel, int32_t state, float* row) const {
    const kernels::ScanParameters& scan = attention_.scan();
    const bool decay_only = setup_.part == v1::PART_H;
    const float A = scan.A[state * scan.d_inner + channel];
    const int64_t of_group = attention_.group_of(channel) * scan.d_state + state;
    float g = decay_only ? 1.0f : scan.C[setup_.target * scan.bc_stride + of_group];
    for (int64_t j = setup_.target; j >= 0; --j) {
      const float delta = scan.delta[j * scan.d_inner + channel];
      row[j] = decay_only ? g : g * delta * scan.B[j * scan.bc_stride + of_group];
      g *= std::exp(delta * A);
    }
  }

  // Q or K of the tokens [begin, end).
  void FillTokens(int64_t begin, int64_t end) {
    const kernels::ScanParameters& scan = attention_.scan();
    float* value = values_.data();
    for (int64_t i = begin; i < end; ++i) {
      for (const int32_t channel : setup_.channels()) {
        const int64_t row = i * scan.bc_stride + attention_.group_of(channel) * scan.d_state;
        for (int64_t n = 0; n < scan.d_state; ++n) {
          *value++ = setup_.part == v1::PART_Q
                         ? scan.C[row + n]
                         : scan.delta[i * scan.d_inner + channel] * scan.B[row + n];
        }
      }
    }
  }

  // Maps are done with by now, so their memory serves once more.
  void CheckLayer() {
    if (!setup_.all_rows || setup_.kind == Setup::Kind::kPerToken) {
      reconstruction_.CheckRow(layer_, setup_.target, attention_);
      return;
    }
    const auto maps = setup_.part == v1::PART_STATE           ? Reconstruction::Maps::kStates
                      : setup_.part == v1::PART_H             ? Reconstruction::Maps::kDecays
                      : setup_.kind == Setup::Kind::kChannels ? Reconstruction::Maps::kChannel
                                                              : Reconstruction::MapsOf(attention_);
    reconstruction_.CheckMaps(layer_, maps, attention_, values_.data());
  }

  const Subject subject_;
  const Setup setup_;
  LayerAttention attention_;
  Reconstruction reconstruction_;
  const int64_t steps_;  // per layer
  int64_t next_ = 0;
  int32_t layer_ = 0;
  Array<float> values_;      // what a step or a layer writes
  Array<float> rows_;        // of CHANNELS, before they are turned
  std::vector<double> row_;  // of a reduction
};

class HiddenAttention : public Method {
 public:
  absl::string_view name() const override { return kName; }

  void Validate(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t /*tokens*/, const std::string& field,
                Violations& violations) const override {
    const v1::HiddenAttention& options = explanation.hidden_attention();
    const v1::Part part = options.part();
    CheckEnum(v1::Part_IsValid(part), part, field + ".part", violations);
    CheckEnum(v1::Rows_IsValid(options.rows()), options.rows(), field + ".rows", violations);
    CheckLayers(options.layers(), config, field, violations);
    const v1::Reduction reduction = options.reduction();
    if (IsFactor(part) && v1::Reduction_IsValid(reduction) &&
        reduction != v1::REDUCTION_UNSPECIFIED && reduction != v1::REDUCTION_CHANNELS) {
      violations.Add(field + ".reduction",
                     absl::StrCat(v1::Reduction_Name(reduction), " does not go with ",
                                  v1::Part_Name(part), ", which allows REDUCTION_CHANNELS only"));
    }
    const bool factor = IsFactor(part) && v1::Reduction_IsValid(reduction);
    CheckReduction(factor ? v1::REDUCTION_CHANNELS : reduction, options.channels(), kMostChannels,
                   options.top_k(), config, field, violations);
    CheckIndices(options.states(), config.d_state, config.d_state, field + ".states", violations);
    if (v1::Part_IsValid(part) && !options.states().empty() && part != v1::PART_STATE &&
        part != v1::PART_H) {
      violations.Add(field + ".states", "is for PART_STATE and PART_H only");
    }
    if (IsPerToken(part) && options.rows() == v1::ROWS_TARGET) {
      violations.Add(field + ".rows", absl::StrCat("ROWS_TARGET does not go with ",
                                                   v1::Part_Name(part), ", which has no rows"));
    }
  }

  Plan MakePlan(const v1::Explanation& explanation, const model::ModelConfig& config,
                int64_t tokens, v1::DataType dtype) const override {
    const Setup setup(explanation, config, tokens);
    const LayerAttention attention = setup.Attention();
    const auto layers = static_cast<int64_t>(setup.layers.size());
    Plan plan;
    plan.tensors.push_back(MakeTensorInfo(std::string(kName), Axes(setup), dtype));
    if (setup.reduction.how == v1::REDUCTION_TOP_K) {
      plan.tensors.push_back(MakeTensorInfo(
          "indices", {{"layers", layers, setup.layers}, {"rank", setup.reduction.top_k, {}}},
          v1::DATA_TYPE_INT32));
    }
    plan.slices = static_cast<int32_t>(layers * setup.steps_per_layer(attention));
    int64_t floats = 0;
    if (setup.kind != Setup::Kind::kReduced) {
      floats = setup.units_per_step() * setup.unit_floats();
      if (setup.kind == Setup::Kind::kChannels && !setup.all_rows) floats *= 2;
    } else {
      floats = setup.all_rows ? tokens * tokens : 3 * setup.prefix;
    }
    plan.memory_bytes =
        attention.memory_bytes() + 4 * floats + Reconstruction::MemoryBytes(config, setup.prefix);
    return plan;
  }

  std::unique_ptr<Explaining> Start(const v1::Explanation& options,
                                    const Subject& subject) const override {
    return std::make_unique<Explainer>(options, subject);
  }

 private:
  static std::vector<Axis> Axes(const Setup& setup) {
    const auto channels = static_cast<int64_t>(setup.channels().size());
    const Axis layer_axis = {"layers", static_cast<int64_t>(setup.layers.size()), setup.layers};
    const Axis channel_axis = {"channels", channels, setup.channels()};
    const Axis state_axis = {"states", static_cast<int64_t>(setup.states.size()), setup.states};
    std::vector<Axis> axes = {layer_axis};
    if (setup.kind == Setup::Kind::kPerToken) {
      axes.insert(axes.end(), {{"tokens", setup.tokens, {}}, channel_axis, state_axis});
      return axes;
    }
    if (setup.kind != Setup::Kind::kReduced) axes.push_back(channel_axis);
    if (setup.kind == Setup::Kind::kInner) axes.push_back(state_axis);
    if (setup.all_rows) axes.push_back({"output_tokens", setup.tokens, {}});
    axes.push_back({"input_tokens", setup.tokens, {}});
    return axes;
  }
};

}  // namespace

std::unique_ptr<const Method> NewHiddenAttention() { return std::make_unique<HiddenAttention>(); }

}  // namespace mambascope::explain
