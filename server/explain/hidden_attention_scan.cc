// Scope SSM of hidden_attention: each layer's maps, reduced, by channel, by state, or in their
// factors (methods.md, section 2; The Hidden Attention of Mamba Models, arXiv 2403.01590).
#include <algorithm>
#include <array>
#include <cmath>

#include "server/base/check.h"
#include "server/base/status.h"
#include "server/explain/hidden_attention_setup.h"
#include "server/explain/map_statistics.h"
#include "server/explain/reconstruction.h"
#include "server/kernels/scan_backward.h"

namespace mambascope::explain {
namespace {

using Setup = HiddenAttentionSetup;
constexpr absl::string_view kName = Setup::kName;

class ScanExplainer : public Explaining {
 public:
  ScanExplainer(const v1::Explanation& options, const Subject& subject)
      : subject_(subject),
        setup_(options, subject.model->config(), subject.tokens, TargetRow(options, subject)),
        weights_(RowWeights(subject)),
        attention_(setup_.Attention()),
        reconstruction_(subject),
        steps_(setup_.steps_per_layer(attention_)) {
    weights_.resize(setup_.prefix);
  }

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

  void Describe(v1::ExplanationFinished* finished) const override {
    if (statistics_.layers_size() > 0) *finished->mutable_statistics() = statistics_;
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
      attention_.AddRow(piece, setup_.target.position, weights_, row_);
    }
    if (step + 1 < steps_) return absl::OkStatus();
    if (setup_.all_rows) {
      const std::span<const float> map(values_.data(), setup_.tokens * setup_.tokens);
      RETURN_IF_ERROR(CheckFinite(kName, layer_, map));
      AddStatistics(*subject_.pool, layer_, map.data(), setup_.tokens, &statistics_);
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

  // `count` maps that `make(direction, maps)` computes with tokens in a direction's own order,
  // turned round where that is the other one, and added.
  template <class Make>
  void MakeMaps(int64_t count, float* maps, const Make& make) {
    const int64_t size = setup_.tokens * setup_.tokens;
    const bool both = attention_.directions().size() == 2;
    for (const int32_t direction : attention_.directions()) {
      if (direction == 0) {
        make(direction, maps);
        continue;
      }
      turned_.Reserve(count * size);
      make(direction, turned_.data());
      for (int64_t m = 0; m < count; ++m) {
        AddTurned(*subject_.pool, turned_.data() + m * size, size, /*overwrite=*/!both,
                  maps + m * size);
      }
    }
  }

  void FillMaps(int64_t begin, int64_t end) {
    const int64_t size = setup_.tokens * setup_.tokens;
    if (setup_.kind == Setup::Kind::kChannels) {
      ForEachGroup(begin, end, [&](std::span<const int32_t> channels, int64_t first) {
        const auto count = static_cast<int64_t>(channels.size());
        MakeMaps(count, values_.data() + first * size, [&](int32_t direction, float* maps) {
          kernels::ChannelMaps(*subject_.pool, attention_.Channels(channels, direction),
                               Indices(count), maps);
        });
      });
      return;
    }
    float* maps = values_.data();
    ForEachChannel(begin, end, [&](int32_t channel, std::span<const int32_t> states) {
      const std::array<int32_t, 1> one = {channel};
      const auto count = static_cast<int64_t>(states.size());
      MakeMaps(count, maps, [&](int32_t direction, float* out) {
        (setup_.part == v1::PART_STATE ? kernels::StateMaps : kernels::DecayMaps)(
            *subject_.pool, attention_.Channels(one, direction), 0, states, out);
      });
      maps += count * size;
    });
  }

  // Rows of `tokens` values, zero behind what the target reads.
  void FillRows(int64_t begin, int64_t end) {
    std::fill_n(values_.data(), (end - begin) * setup_.tokens, 0.0f);
    if (setup_.kind == Setup::Kind::kChannels) {
      ForEachGroup(begin, end, [&](std::span<const int32_t> channels, int64_t first) {
        for (const int32_t direction : attention_.directions()) {
          AddChannelRows(channels, direction, values_.data() + first * setup_.tokens);
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

  void AddChannelRows(std::span<const int32_t> channels, int32_t direction, float* out) {
    const kernels::ScanParameters scan = attention_.Channels(channels, direction);
    rows_.Reserve(setup_.prefix * scan.d_inner);
    if (setup_.target.spread) {
      for (int64_t i = 0; i < setup_.prefix; ++i) {
        std::fill_n(rows_.data() + i * scan.d_inner, scan.d_inner, weights_[i]);
      }
      kernels::ScanAdjoint(*subject_.pool, scan, rows_.data(), rows_.data(), /*accumulate=*/false);
    } else {
      kernels::TargetRows(*subject_.pool, scan, attention_.Place(direction, setup_.target.position),
                          false, rows_.data());
    }
    for (int64_t j = 0; j < setup_.prefix; ++j) {
      const float* row = rows_.data() + attention_.Place(direction, j) * scan.d_inner;
      for (int64_t c = 0; c < scan.d_inner; ++c) out[c * setup_.tokens + j] += row[c];
    }
  }

  // The target's row of one state of one channel: the adjoint recurrence with one state.
  void InnerRow(int32_t channel, int32_t state, float* row) const {
    const int32_t direction = attention_.directions()[0];
    const kernels::ScanParameters& scan = attention_.scan(direction);
    const bool decay_only = setup_.part == v1::PART_H, spread = setup_.target.spread;
    const float A = scan.A[state * scan.d_inner + channel];
    const int64_t of_group = attention_.group_of(channel) * scan.d_state + state;
    const int64_t target = attention_.Place(direction, setup_.target.position);
    float g = 0;
    for (int64_t j = spread ? setup_.prefix - 1 : target; j >= 0; --j) {
      const float weight = spread ? weights_[j] : j == target ? 1.0f : 0.0f;
      if (weight != 0) g += decay_only ? weight : weight * scan.C[j * scan.bc_stride + of_group];
      const float delta = scan.delta[j * scan.d_inner + channel];
      row[attention_.Place(direction, j)] =
          decay_only ? g : g * delta * scan.B[j * scan.bc_stride + of_group];
      g *= std::exp(delta * A);
    }
  }

  // Q or K of the tokens [begin, end).
  void FillTokens(int64_t begin, int64_t end) {
    const int32_t direction = attention_.directions()[0];
    const kernels::ScanParameters& scan = attention_.scan(direction);
    float* value = values_.data();
    for (int64_t token = begin; token < end; ++token) {
      const int64_t i = attention_.Place(direction, token);
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
    if (!setup_.by_map()) {
      reconstruction_.CheckRow(layer_, setup_.target, weights_, attention_);
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
  std::vector<float> weights_;  // of rows, [prefix]
  LayerAttention attention_;
  Reconstruction reconstruction_;
  const int64_t steps_;  // per layer
  int64_t next_ = 0;
  int32_t layer_ = 0;
  Array<float> values_;  // what a step or a layer writes
  Array<float> rows_;    // of CHANNELS, before they are written
  Array<float> turned_;  // maps of the backward scan
  v1::MapStatistics statistics_;
  std::vector<double> row_;  // of a reduction
};

Work LayerWork(const Setup& setup, const LayerAttention& attention) {
  Work work = setup.by_map() ? Reconstruction::MapsWork(setup.config, setup.prefix)
                             : Reconstruction::RowWork(setup.config, setup.prefix);
  if (setup.kind == Setup::Kind::kReduced) {
    work += attention.work();
    return work;
  }
  if (setup.kind == Setup::Kind::kPerToken) return work;
  const auto scans = static_cast<double>(attention.directions().size());
  const double states = setup.kind == Setup::Kind::kInner ? 1 : setup.config.d_state;
  const double of_unit = scans * static_cast<double>(setup.units()) * states;
  const auto length = static_cast<double>(setup.prefix);
  (setup.all_rows ? work.map : work.scan) +=
      of_unit * (setup.all_rows ? length * (length + 1) / 2 : length);
  return work;
}

}  // namespace

std::unique_ptr<Explaining> ExplainScan(const v1::Explanation& options, const Subject& subject) {
  return std::make_unique<ScanExplainer>(options, subject);
}

void PlanScan(const HiddenAttentionSetup& setup, Plan* plan) {
  const LayerAttention attention = setup.Attention();
  const auto layers = static_cast<int64_t>(setup.layers.size());
  plan->slices = layers * setup.steps_per_layer(attention);
  int64_t floats = 4 * setup.prefix;
  if (setup.kind == Setup::Kind::kReduced) {
    floats += setup.all_rows ? setup.tokens * (setup.tokens + 10) : 3 * setup.prefix;
  } else {
    const int64_t values = setup.units_per_step() * setup.unit_floats();
    const bool twice = (setup.kind == Setup::Kind::kChannels && !setup.all_rows) ||
                       (setup.by_map() && attention.directions().back() == 1);
    floats += twice ? 2 * values : values;
  }
  plan->memory_bytes = attention.memory_bytes() + 4 * floats +
                       Reconstruction::MemoryBytes(setup.config, setup.prefix);
  plan->work = static_cast<double>(layers) * LayerWork(setup, attention);
}

}  // namespace mambascope::explain
