"""Writes cases.tsv: what the Python tokenizers package makes of some texts, for tokenizer_test.cc.

    pip install tokenizers==0.22.2
    python tests/golden/tokenizer/make_cases.py deploy/models/atlas-mamba/1/tokenizer.json

Run it again only when that tokenizer.json changes. One line a text: the text as hex of its UTF-8,
the ids, and the spans as begin:end in bytes. Python counts characters; here they become bytes.
"""

import pathlib
import sys

import tokenizers

TEXTS = [
    "",
    " ",
    "Paris",
    " Paris",
    "The capital of France is Paris.",
    "  two  spaces,   three   and a tail   ",
    "tab\tnew\nline\r\nreturn\u00a0no-break\u2028separator\u3000wide",
    "don't won't we'll I've they're it'd I'm",
    "1234567890 3.14159 -2e10 0x7fff",
    "CamelCase snake_case kebab-case SHOUTING",
    "!?.,;:()[]{}<>@#$%^&*-_=+|\\/~`'\"",
    "caf\u00e9",  # composed
    "cafe\u0301",  # decomposed: a combining mark after a letter
    "\u0301",  # a combining mark alone
    "\u0301\u0302\u0303 \u0300x",
    "Z\u0351\u036b\u0343a\u0363\u0329lgo",
    "\u20ac100 \u00a35 \u00a57",
    "\ufb01ligature \u2126 \u212b \u00b5",  # what NFKC would change
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0",
    "\u4e2d\u6587\uff0c\u6807\u70b9\u3002",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \ud55c\uad6d\uc5b4",
    "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f flag",
    "\U0001f44d\U0001f3fd\u2764\ufe0f",
    "a\x00b\x00\x00c",
    "\x01\x02\x1f\x7f\u0080\u009f",
    "\ufeffbyte order mark, \ufffd replacement, \uffff last of the plane, \U0010ffff last of all",
    "<|endoftext|>",
    "before<|endoftext|>after <|padding|> <|endoftext|",
    "<|ENDOFTEXT|> <|endoftext|><|endoftext|>",
    "a" * 300,
    " " * 100 + "x",
]


def main(path):
    tokenizer = tokenizers.Tokenizer.from_file(path)
    lines = []
    for text in TEXTS:
        encoding = tokenizer.encode(text)
        at = [len(text[:n].encode()) for n in range(len(text) + 1)]
        ids = ",".join(str(i) for i in encoding.ids)
        spans = ",".join(f"{at[begin]}:{at[end]}" for begin, end in encoding.offsets)
        lines.append(f"{text.encode().hex()}\t{ids}\t{spans}\n")
    pathlib.Path(__file__).with_name("cases.tsv").write_text("".join(lines))


main(sys.argv[1])
