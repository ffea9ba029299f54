#include "client/cli/render_faithfulness.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/heat_scale.h"
#include "client/cli/table.h"

namespace mambascope::cli {
namespace {

using Against = v1::FaithfulnessReport::Against;

enum class Verdict { kUnknown, kWorse, kNoBetter, kBetter };

// `more`: larger is better.
Verdict Compare(const Against& against, bool more) {
  if (!against.has_random_mean()) return Verdict::kUnknown;
  // One draw has a mean but no interval.
  const double low = against.has_random_low() ? against.random_low() : against.random_mean();
  const double high = against.has_random_high() ? against.random_high() : against.random_mean();
  if (against.value() > high) return more ? Verdict::kBetter : Verdict::kWorse;
  if (against.value() < low) return more ? Verdict::kWorse : Verdict::kBetter;
  return Verdict::kNoBetter;
}

const char* Words(Verdict verdict) {
  switch (verdict) {
    case Verdict::kBetter:
      return "better than random";
    case Verdict::kWorse:
      return "WORSE than random";
    case Verdict::kNoBetter:
      return "as random";
    case Verdict::kUnknown:
      break;
  }
  return "";
}

TableRow Line(const std::string& name, const Against& against, bool more) {
  std::string random, interval;
  if (against.has_random_mean()) random = absl::StrFormat("%.4g", against.random_mean());
  if (against.has_random_low() && against.has_random_high()) {
    interval = absl::StrFormat("%.4g to %.4g", against.random_low(), against.random_high());
  }
  return {name, absl::StrFormat("%.4g", against.value()), std::move(random), std::move(interval),
          Words(Compare(against, more))};
}

std::string Percent(float share) { return absl::StrFormat("%.4g %%", 100 * share); }

void AddShares(const v1::FaithfulnessReport& report, std::vector<TableRow>* rows) {
  const auto add = [&](const char* name, const auto& numbers, bool more) {
    for (int i = 0; i < numbers.size() && i < report.shares_size(); ++i) {
      rows->push_back(Line(absl::StrCat(name, " ", Percent(report.shares(i))), numbers[i], more));
    }
  };
  add("comprehensiveness", report.comprehensiveness(), true);
  add("sufficiency", report.sufficiency(), false);
  add("log-odds", report.log_odds(), false);
}

// The two curves that begin with the most relevant tokens decide.
const char* Conclusion(const v1::FaithfulnessReport& report) {
  const Verdict removed = Compare(report.deletion_most_auc(), false);
  const Verdict kept = Compare(report.insertion_most_auc(), true);
  if (removed == Verdict::kUnknown || kept == Verdict::kUnknown) {
    return "no random orders to compare with";
  }
  if (removed == Verdict::kBetter && kept == Verdict::kBetter) {
    return "the model agrees with these scores: without the best tokens it loses more, and with "
           "them alone it keeps more, than with random ones";
  }
  if (removed == Verdict::kBetter || kept == Verdict::kBetter) {
    return removed == Verdict::kBetter
               ? "the model agrees in part: it needs the best tokens, but they alone do not suffice"
               : "the model agrees in part: the best tokens suffice, but it does without them";
  }
  if (removed == Verdict::kWorse && kept == Verdict::kWorse) {
    return "the model disagrees with these scores: random ones do better";
  }
  return "the model does not agree with these scores: random ones do as well";
}

}  // namespace

void RenderFaithfulness(const Screen& screen, const v1::FaithfulnessReport& report,
                        std::ostream& out) {
  out << "  " << Dim(screen)
      << absl::StrFormat(
             "faithfulness: %d tokens removed in order, %d random orders, %d evaluations, "
             "probability %.4g",
             report.candidates(), report.random_draws(), report.evaluations(), report.probability())
      << Reset(screen) << "\n";
  std::vector<TableRow> rows = {
      {"", "scores", "random", "95 % interval", ""},
      Line("deletion area, best first", report.deletion_most_auc(), false),
      Line("deletion area, least first", report.deletion_least_auc(), true),
      Line("insertion area, best first", report.insertion_most_auc(), true),
      Line("insertion area, least first", report.insertion_least_auc(), false)};
  AddShares(report, &rows);
  PrintTable(rows, 4, out);
  out << "    " << Conclusion(report) << "\n";
}

}  // namespace mambascope::cli
