// Times whole models through the engine, without the server, and prints one JSON line a
// measurement, in the format of the peers' benchmark: {"peer", "work", "tokens", "seconds",
// "tokens_per_s"}.
//
//   model_bench --make DIR [mamba2]     writes a random model of mamba-130m's (mamba2-130m's) shape
//   model_bench DIR [--threads N] [--repeats N] [--label TEXT] WORK...
// WORK: prefill:L, decode:N, joined:N (8 sequences decode together), gemm, deletions:L (32 sets of
// an order's first tokens deleted), single_deletions:L (32 tokens, each alone), or an explanation
// method and its options as text, as in attention_rollout:L or latim{norm:NORM_L2}:L. The label is
// put before each work's name.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "google/protobuf/text_format.h"
#include "server/explain/options.h"
#include "server/explain/registry.h"
#include "server/explain/variants.h"
#include "server/kernels/gemm.h"
#include "server/model/mamba_model.h"
#include "tests/support/random_model.h"

namespace mambascope {
namespace {

double BestSeconds(int repeats, const std::function<void()>& run) {
  double best = 1e30;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

std::string label;

void Print(const std::string& work, int64_t tokens, double seconds) {
  std::printf(
      "{\"peer\": \"mambascope\", \"work\": \"%s%s\", \"tokens\": %lld, \"seconds\": %.5f, "
      "\"tokens_per_s\": %.1f}\n",
      label.c_str(), work.c_str(), static_cast<long long>(tokens), seconds,
      static_cast<double>(tokens) / seconds);
  std::fflush(stdout);
}

// Drops what is delivered: the cost of a reader is not the explanation's.
class NullSink : public explain::EventSink {
 public:
  void Send(v1::PredictEvent) override {}
};

class Bench {
 public:
  Bench(std::unique_ptr<const model::MambaModel> model, int threads, int repeats)
      : model_(std::move(model)), pool_(threads), repeats_(repeats) {}

  void Run(const std::string& work) {
    const size_t colon = work.rfind(':');
    const std::string name = work.substr(0, colon), method_name = name.substr(0, name.find('{'));
    const int64_t count = colon == std::string::npos ? 0 : std::atoll(work.c_str() + colon + 1);
    if (name == "prefill") {
      Print("prefill " + std::to_string(count), count,
            BestSeconds(repeats_, [&] { Prefill(count, nullptr); }));
    } else if (name == "decode") {
      Decode(count);
    } else if (name == "joined") {
      Joined(count);
    } else if (name == "deletions" || name == "single_deletions") {
      Deletions(name, count);
    } else if (name == "gemm") {
      Gemm();
    } else if (const explain::Method* method = explain::FindMethod(method_name)) {
      Explain(*method, name, count);
    } else {
      std::fprintf(stderr, "model_bench: unknown work '%s'\n", work.c_str());
      std::exit(2);
    }
  }

 private:
  std::vector<int32_t> Tokens(int64_t count) const {
    std::mt19937 random(0);
    std::vector<int32_t> tokens(count);
    for (int32_t& token : tokens)
      token = static_cast<int32_t>(random() % model_->config().vocabulary);
    return tokens;
  }

  // As the server does it: pieces of at most 512 tokens, logits of the last one.
  model::RecurrentState Prefill(int64_t count, model::SequenceTrace* trace) {
    constexpr int64_t kPiece = 512;
    const std::vector<int32_t> tokens = Tokens(count);
    model::RecurrentState state(model_->config());
    for (int64_t begin = 0; begin < count; begin += kPiece) {
      const int64_t length = std::min(kPiece, count - begin);
      const int32_t last = static_cast<int32_t>(length - 1);
      model::Piece piece;
      piece.tokens = std::span(tokens).subspan(begin, length);
      piece.state = &state;
      piece.trace = trace;
      if (begin + length == count) piece.logit_rows = std::span(&last, 1);
      piece.logits = &logits_;
      Forward(piece);
    }
    return state;
  }

  void Forward(model::Piece& piece) {
    const absl::Status status =
        model_->Forward(pool_, workspace_, std::span(&piece, 1), [] { return false; });
    if (!status.ok() || piece.nonfinite_layer >= 0) std::abort();
  }

  void Decode(int64_t count) {
    model::RecurrentState state = Prefill(8, nullptr);
    const int32_t row = 0;
    Print("decode", count, BestSeconds(repeats_, [&] {
            int32_t token = 1;
            for (int64_t i = 0; i < count; ++i) {
              model::Piece piece;
              piece.tokens = std::span(&token, 1);
              piece.state = &state;
              piece.logit_rows = std::span(&row, 1);
              piece.logits = &logits_;
              Forward(piece);
              token = static_cast<int32_t>(std::max_element(logits_.begin(), logits_.end()) -
                                           logits_.begin());
            }
          }));
  }

  // Eight sequences, a step of each in every pass.
  void Joined(int64_t count) {
    constexpr int64_t kSequences = 8;
    std::vector<model::RecurrentState> states;
    for (int64_t s = 0; s < kSequences; ++s) states.push_back(Prefill(8, nullptr));
    const int32_t row = 0;
    std::vector<std::vector<float>> logits(kSequences);
    Print("joined 8", kSequences * count, BestSeconds(repeats_, [&] {
            std::vector<int32_t> tokens(kSequences, 1);
            for (int64_t i = 0; i < count; ++i) {
              std::vector<model::Piece> pieces(kSequences);
              for (int64_t s = 0; s < kSequences; ++s) {
                pieces[s].tokens = std::span(&tokens[s], 1);
                pieces[s].state = &states[s];
                pieces[s].logit_rows = std::span(&row, 1);
                pieces[s].logits = &logits[s];
              }
              if (!model_->Forward(pool_, workspace_, pieces, [] { return false; }).ok()) {
                std::abort();
              }
              for (int64_t s = 0; s < kSequences; ++s) {
                tokens[s] = static_cast<int32_t>(
                    std::max_element(logits[s].begin(), logits[s].end()) - logits[s].begin());
              }
            }
          }));
  }

  void Explain(const explain::Method& method, const std::string& text, int64_t count) {
    v1::Explanation options;
    const std::string message = text.find('{') == std::string::npos ? text + "{}" : text;
    if (!google::protobuf::TextFormat::ParseFromString(message, &options)) std::exit(2);
    const explain::Plan plan =
        method.MakePlan(options, model_->config(), count, v1::DATA_TYPE_FP32);
    model::SequenceTrace trace(
        model_->config(), count,
        plan.streams ? model::SequenceTrace::StreamStride(model_->config(), count) : 0);
    Prefill(count, &trace);
    const std::vector<int32_t> tokens = Tokens(count);
    const explain::Subject subject = SubjectOf(tokens, &trace);
    NullSink sink;
    const double seconds = BestSeconds(repeats_, [&] {
      explain::TensorWriter writer("bench", plan.tensors, 1 << 20, &sink);
      const auto explaining = method.Start(options, subject);
      for (int32_t slice = 0; slice < plan.slices; ++slice) {
        if (!explaining->Step(writer).ok()) std::abort();
      }
      if (!explaining->quality().within_tolerance()) std::abort();
    });
    Print(text + " " + std::to_string(count), count, seconds);
  }

  // What the prefill just now predicted.
  explain::Subject SubjectOf(std::span<const int32_t> tokens, const model::SequenceTrace* trace) {
    explain::Subject subject;
    subject.model = model_.get();
    subject.trace = trace;
    subject.pool = &pool_;
    subject.position = static_cast<int32_t>(tokens.size() - 1);
    subject.tokens = static_cast<int64_t>(tokens.size());
    subject.token_ids = tokens;
    const auto best = std::max_element(logits_.begin(), logits_.end());
    subject.outputs = {{subject.position, static_cast<int32_t>(best - logits_.begin()), -1}};
    subject.explained = *best;
    subject.padding_token = 0;
    return subject;
  }

  // 32 variants of a prompt, tokens deleted from it: growing sets, or one each.
  void Deletions(const std::string& name, int64_t count) {
    constexpr int64_t kDeletions = 32;
    const bool alone = name == "single_deletions";
    Prefill(count, nullptr);
    const std::vector<int32_t> tokens = Tokens(count);
    std::vector<int32_t> order = explain::Indices(count - 1);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    std::vector<std::vector<int32_t>> removed;
    for (int64_t i = 1; i <= kDeletions; ++i) {
      const int64_t end = i * (count - 1) / kDeletions;
      removed.emplace_back(order.begin() + (alone ? end - 1 : 0), order.begin() + end);
      std::sort(removed.back().begin(), removed.back().end());
    }
    const explain::Subject subject = SubjectOf(tokens, nullptr);
    Print(name + " " + std::to_string(count), count, BestSeconds(repeats_, [&] {
            explain::VariantRunner runner(subject, {explain::Removal::How::kDelete, -1}, removed);
            for (int64_t slice = 0; slice < runner.slices(); ++slice) {
              if (!runner.Step().ok()) std::abort();
            }
          }));
  }

  // The rate that the maps are held against: the largest product of a prefill, in FLOP/s as
  // "tokens".
  void Gemm() {
    const int64_t rows = 1024, inner = model_->config().d_model,
                  cols = 2 * model_->config().d_inner;
    const std::vector<float> x(rows * inner, 0.5f), w(cols * inner, 0.25f);
    std::vector<float> y(rows * cols);
    const double seconds = BestSeconds(5 * repeats_, [&] {
      kernels::Linear(pool_, {x.data(), rows, inner, inner}, {w.data(), cols, inner, inner},
                      nullptr, {y.data(), rows, cols, cols});
    });
    Print("gemm", 2 * rows * inner * cols, seconds);
  }

  std::unique_ptr<const model::MambaModel> model_;
  ThreadPool pool_;
  const int repeats_;
  model::Workspace workspace_;
  std::vector<float> logits_;
};

int Make(const std::string& folder, bool mamba2) {
  testing::RandomModel shape;
  shape.vocabulary = 50280;
  shape.d_model = 768;
  shape.d_inner = 1536;
  shape.d_state = 16;
  shape.d_conv = 4;
  shape.dt_rank = 48;
  shape.layers = 24;
  if (mamba2) {
    shape.family = "mamba2";
    shape.heads = 24;
    shape.head_dim = 64;
    shape.groups = 1;
    shape.d_state = 128;
  }
  testing::WriteRandomModel(folder, shape);
  return 0;
}

int Main(int argc, char** argv) {
  if (argc >= 3 && std::string(argv[1]) == "--make") {
    return Make(argv[2], argc > 3 && std::string(argv[3]) == "mamba2");
  }
  if (argc < 3) {
    std::fprintf(stderr,
                 "usage: model_bench --make DIR [mamba2] | DIR [--threads N] [--repeats N] "
                 "[--label TEXT] WORK...\n");
    return 2;
  }
  auto model = model::MambaModel::Load(argv[1]);
  if (!model.ok()) {
    std::fprintf(stderr, "model_bench: %s\n", std::string(model.status().message()).c_str());
    return 2;
  }
  int threads = 2, repeats = 2, first = 2;
  for (; first + 1 < argc && argv[first][0] == '-'; first += 2) {
    const std::string flag = argv[first];
    if (flag == "--label") {
      label = std::string(argv[first + 1]) + " ";
    } else {
      (flag == "--threads" ? threads : repeats) = std::atoi(argv[first + 1]);
    }
  }
  Bench bench(*std::move(model), threads, repeats);
  for (int i = first; i < argc; ++i) bench.Run(argv[i]);
  return 0;
}

}  // namespace
}  // namespace mambascope

int main(int argc, char** argv) { return mambascope::Main(argc, argv); }
