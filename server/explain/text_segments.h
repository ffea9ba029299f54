#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"

namespace mambascope::explain {

// Where the words and sentences of a UTF-8 text begin: ascending byte offsets, the first 0; none of
// an empty text. Together they cover the text: whitespace belongs to what follows it, as a leading
// space belongs to its token in the vocabularies of language models.
//
// Simple rules that need no tables of languages. Scripts written without spaces give one word
// between two marks of punctuation.

// A word is a run of characters that are neither whitespace nor punctuation, or a run of
// punctuation
// ("?!"). An apostrophe between two characters of words ("don't") and a point or comma between two
// ASCII digits ("3.14") do not end a word; an underscore is no punctuation. Whitespace that ends
// the text is a word of its own.
std::vector<uint32_t> WordStarts(absl::string_view text);

// A sentence ends after . ! ? or an ellipsis, and closing quotes and brackets behind them, where
// whitespace or the text's end follows; after their wide forms (CJK) whatever follows; and before
// whitespace that holds a line break. Whitespace that ends the text belongs to the last one.
// Abbreviations are not known: "Mr. Smith" is two.
std::vector<uint32_t> SentenceStarts(absl::string_view text);

}  // namespace mambascope::explain
