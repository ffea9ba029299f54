#include "client/cli/explanation_view.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/errors.h"
#include "client/cli/heat_scale.h"
#include "client/cli/render_faithfulness.h"
#include "client/cli/render_groups.h"
#include "client/cli/render_map.h"
#include "client/cli/render_patches.h"
#include "client/cli/render_quality.h"
#include "client/cli/render_statistics.h"
#include "client/cli/target_text.h"
#include "client/cli/tensor_values.h"

namespace mambascope::cli {
namespace {

constexpr absl::string_view kWithoutSelf = "without_self";  // of mamba_attribution
constexpr absl::string_view kIds = "ids";                   // of lenses

std::string Shape(const v1::TensorInfo& info) {
  std::vector<std::string> axes;
  for (const auto& axis : info.axes()) axes.push_back(absl::StrCat(axis.size(), " ", axis.name()));
  return absl::StrCat("[", absl::StrJoin(axes, ", "), "]");
}

const Tensor* Find(const std::vector<Tensor>& tensors, absl::string_view name) {
  for (const Tensor& tensor : tensors) {
    if (tensor.info.name() == name) return &tensor;
  }
  return nullptr;
}

// What the request asked of this explanation; nothing if it cannot be told.
const v1::Explanation& Asked(const v1::PredictRequest& request, const std::string& id) {
  for (const v1::Explanation& explanation : request.explanations()) {
    if (explanation.id() == id) return explanation;
  }
  // Ids that the server made name the method.
  for (const v1::Explanation& explanation : request.explanations()) {
    const auto* field = v1::Explanation::descriptor()->FindFieldByNumber(explanation.method_case());
    if (explanation.id().empty() && field != nullptr && field->name() == id) return explanation;
  }
  return v1::Explanation::default_instance();
}

class View {
 public:
  View(const Screen& screen, const ExplanationAnswer& explanation,
       const ExplanationContext& context, std::ostream& out)
      : screen_(screen),
        explanation_(explanation),
        tensors_(explanation.tensors.tensors()),
        context_(context),
        out_(out),
        tokens_(InputTokens()) {}

  void Show() {
    ShowTitle();
    if (!explanation_.succeeded()) {
      out_ << "  failed: " << CodeName(explanation_.end.status().code()) << ": "
           << Safe(explanation_.end.status().message()) << "\n";
      return;
    }
    ShowTensors();
    RenderStatistics(screen_, explanation_.end.statistics(), out_);
    for (const v1::GroupedScores& groups : explanation_.end.groups()) {
      RenderGroups(screen_, groups, context_.request.text(), tokens_, out_);
    }
    for (const std::string& line : QualityLines(explanation_.end)) {
      out_ << "  " << Safe(line) << "\n";
    }
    if (explanation_.end.has_faithfulness()) {
      RenderFaithfulness(screen_, explanation_.end.faithfulness(), out_);
    }
  }

 private:
  std::string Safe(absl::string_view text) const { return Escaped(text, screen_.utf8); }

  // The prompt, and of a generated target what was generated before it.
  std::span<const TokenLabel> InputTokens() const {
    const v1::ResolvedTarget& target = explanation_.started.target();
    size_t count = context_.prompt_tokens;
    if (target.has_generated()) count = static_cast<size_t>(std::max(target.position() + 1, 0));
    return context_.tokens.first(std::min(count, context_.tokens.size()));
  }

  void ShowTitle() {
    const v1::ExplanationStarted& started = explanation_.started;
    out_ << "\n" << Bold(screen_) << Safe(started.explanation_id()) << Reset(screen_);
    if (started.method() != started.explanation_id() && !started.method().empty()) {
      out_ << " (" << Safe(started.method()) << ")";
    }
    out_ << "\n";
    if (!started.has_target()) return;
    const v1::Explanation& asked = Asked(context_.request, started.explanation_id());
    out_ << "  " << Safe(TargetText(started.target(), asked.target().value(), context_.classes))
         << "\n";
  }

  void ShowTensors() {
    const Tensor* without_self = Find(tensors_, kWithoutSelf);
    int curves = 0;
    for (const Tensor& tensor : tensors_) {
      if (absl::StartsWith(tensor.info.name(), "faithfulness/")) {
        ++curves;
        continue;
      }
      out_ << "  " << Dim(screen_) << Safe(tensor.info.name()) << " " << Safe(Shape(tensor.info))
           << Reset(screen_);
      const bool main = &tensor == &tensors_.front();
      if (main && without_self != nullptr) {
        out_ << "  not shown: nearly all of it is the target's own identity path\n";
      } else if (main || &tensor == without_self) {
        out_ << "\n";
        ShowValues(tensor);
      } else {
        ShowOther(tensor);
      }
    }
    if (curves > 0) {
      out_ << "  " << Dim(screen_) << "faithfulness/... " << curves << " curves; --output writes "
           << "them" << Reset(screen_) << "\n";
    }
  }

  void ShowValues(const Tensor& tensor) {
    const auto values = Floats(tensor);
    if (!values.ok()) {
      out_ << "  " << Safe(values.status().message()) << "\n";
      return;
    }
    const int position = explanation_.started.target().position();
    if (const Tensor* ids = Find(tensors_, kIds); ids != nullptr) {
      RenderLens(screen_, tensor.info, *values, Integers(*ids), tokens_, context_.pieces, out_);
      return;
    }
    const bool scores = tensor.info.axes_size() == 1;
    if (context_.request.has_image() && scores && RenderPatches(screen_, *values, position, out_)) {
      return;
    }
    RenderTensor(screen_, tensor.info, *values, tokens_, position, out_);
  }

  // One number beside its name, rows of layers as those of the main tensor, the rest by name only.
  void ShowOther(const Tensor& tensor) {
    const v1::TensorInfo& info = tensor.info;
    if (info.dtype() != v1::DATA_TYPE_INT32 && info.axes_size() == 1 && info.axes(0).size() == 1) {
      if (const auto values = Floats(tensor); values.ok()) out_ << "  " << Number(values->front());
    }
    out_ << "\n";
    if (info.axes_size() == 2 && info.axes(0).name() == "layers" &&
        info.axes(1).name() == "input_tokens") {
      ShowValues(tensor);
    }
  }

  const Screen& screen_;
  const ExplanationAnswer& explanation_;
  const std::vector<Tensor>& tensors_;
  const ExplanationContext& context_;
  std::ostream& out_;
  const std::span<const TokenLabel> tokens_;
};

}  // namespace

void RenderExplanation(const Screen& screen, const ExplanationAnswer& explanation,
                       const ExplanationContext& context, std::ostream& out) {
  View(screen, explanation, context, out).Show();
}

}  // namespace mambascope::cli
