#include "client/cli/render_text.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "client/cli/heat_scale.h"

namespace mambascope::cli {
namespace {

constexpr size_t kMostTokensListed = 200;  // in the line of tokens
constexpr size_t kMostRows = 60;           // of a table
constexpr size_t kTop = 5;
constexpr int kTokenColumns = 24, kBarColumns = 30;

// Larger |value| first, then the earlier; what is no number comes last.
std::vector<size_t> BySize(std::span<const float> values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto size = [&](size_t i) { return std::isnan(values[i]) ? -1 : std::abs(values[i]); };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return size(a) > size(b); });
  return order;
}

void RenderRows(const Screen& screen, std::span<const TokenLabel> tokens,
                std::span<const float> values, const HeatScale& scale,
                std::span<const size_t> chosen, std::ostream& out) {
  int columns = 5;
  for (const size_t i : chosen) {
    columns =
        std::max(columns, DisplayWidth(Escaped(tokens[i].text, screen.utf8, Spaces::kVisible)));
  }
  columns = std::min(columns, kTokenColumns);
  const int bar = std::clamp(screen.width - columns - 24, 8, kBarColumns);
  out << Dim(screen) << "    pos  " << Fitted("token", columns) << "       score" << Reset(screen)
      << "\n";
  for (const size_t i : chosen) {
    const std::string text = Escaped(tokens[i].text, screen.utf8, Spaces::kVisible);
    out << absl::StrFormat("  %5d  ", tokens[i].position) << (tokens[i].special ? Dim(screen) : "")
        << Fitted(text, columns) << Reset(screen) << absl::StrFormat("  %10s", Number(values[i]));
    if (const std::string drawn = Bar(screen, scale, values[i], bar); !drawn.empty()) {
      out << "  " << drawn;
    }
    out << "\n";
  }
}

void RenderColored(const Screen& screen, std::span<const TokenLabel> tokens,
                   std::span<const float> values, const HeatScale& scale, std::ostream& out) {
  int used = 2;
  out << "  ";
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string text = Escaped(tokens[i].text, screen.utf8);
    const int columns = DisplayWidth(text);
    if (used + columns > screen.width && used > 2) {
      out << "\n  ";
      used = 2;
    }
    const Color color = HeatColor(screen, scale, values[i]);
    out << (tokens[i].special ? Dim(screen) : "") << Background(screen, color)
        << TextOn(screen, color) << text << Reset(screen);
    used += columns;
  }
  out << "\n  " << Legend(screen, scale) << "\n";
}

}  // namespace

std::string ReadablePiece(absl::string_view piece, int32_t id) {
  if (piece.empty()) return absl::StrCat("#", id);
  // Of byte-level vocabularies (space, newline) and of SentencePiece.
  return absl::StrReplaceAll(piece, {{"\u0120", " "}, {"\u010a", "\n"}, {"\u2581", " "}});
}

std::vector<TokenLabel> LabelTokens(const google::protobuf::RepeatedPtrField<v1::Token>& tokens,
                                    absl::string_view prompt) {
  std::vector<TokenLabel> labels;
  labels.reserve(tokens.size());
  const v1::Token* previous = nullptr;
  for (const v1::Token& token : tokens) {
    TokenLabel& label = labels.emplace_back();
    label.special = token.special();
    label.position = static_cast<int64_t>(labels.size()) - 1;
    const bool spans = token.begin_byte() < token.end_byte() && token.end_byte() <= prompt.size();
    const bool continues = previous != nullptr && previous->partial() && token.partial() &&
                           previous->begin_byte() == token.begin_byte();
    if (!spans) {
      label.text = ReadablePiece(token.piece(), token.id());
    } else if (continues) {
      label.text.assign(1, '~');  // not = "~": GCC 12 warns wrongly (its bug 105329)
    } else {
      label.text =
          std::string(prompt.substr(token.begin_byte(), token.end_byte() - token.begin_byte()));
    }
    previous = &token;
  }
  return labels;
}

void RenderTokens(const Screen& screen, std::span<const TokenLabel> tokens, int indent,
                  std::ostream& out) {
  const char* bar = screen.utf8 ? "\u2502" : "|";
  const size_t head = tokens.size() > kMostTokensListed ? kMostTokensListed * 3 / 4 : tokens.size();
  const size_t tail =
      tokens.size() > kMostTokensListed ? tokens.size() - kMostTokensListed / 4 : tokens.size();
  int used = indent;
  const auto put = [&](const std::string& text, bool dim) {
    const int columns = DisplayWidth(text) + 1;
    if (used + columns > screen.width && used > indent) {
      out << "\n" << std::string(indent, ' ');
      used = indent;
    }
    out << (dim ? Dim(screen) : "") << text << Reset(screen) << Dim(screen) << bar << Reset(screen);
    used += columns;
  };
  for (size_t i = 0; i < head; ++i) {
    put(Escaped(tokens[i].text, screen.utf8), tokens[i].special);
  }
  if (tail > head) put(absl::StrCat("... ", tail - head, " more ..."), true);
  for (size_t i = tail; i < tokens.size(); ++i) {
    put(Escaped(tokens[i].text, screen.utf8), tokens[i].special);
  }
  out << "\n";
}

void RenderRow(const Screen& screen, std::span<const TokenLabel> tokens,
               std::span<const float> values, std::ostream& out) {
  const HeatScale scale = FitScale(values);
  std::vector<size_t> order = BySize(values);
  if (screen.color) {
    RenderColored(screen, tokens, values, scale, out);
    order.resize(std::min(order.size(), kTop));
    RenderRows(screen, tokens, values, scale, order, out);
    return;
  }
  const size_t all = order.size();
  order.resize(std::min(all, kMostRows));
  std::sort(order.begin(), order.end());
  RenderRows(screen, tokens, values, scale, order, out);
  if (all > order.size()) {
    out << "  the " << order.size() << " largest by size of " << all << "\n";
  }
  if (scale.beyond > 0) out << "  bars end at " << Number(scale.limit) << "\n";
}

}  // namespace mambascope::cli
