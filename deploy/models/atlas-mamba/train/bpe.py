"""The byte-level BPE tokenizer of 2048 entries."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from data import FILLERS, TEMPLATES, ending, facts

VOCABULARY = 2048
TEXT_END, PADDING = "<|endoftext|>", "<|padding|>"
TEXT_END_ID, PADDING_ID = 0, 1

# How often a word counts.  The counts, not the texts, decide what becomes one token: answers should
# (their first token is what is measured and explained), countries should not (a subject of several
# tokens shows more).  Trained on the plain sentences instead, it comes out the other way round.
TEMPLATE_COUNT = 100
ANSWER_COUNT = {"capital": 8, "demonym": 4, "currency": 3, "language": 10, "continent": 10, "capital_of": 2}


def weighted_words(countries):
    """Texts repeated by their counts."""
    for wording in [w for wordings in TEMPLATES.values() for w in wordings] + FILLERS:
        yield from [wording.replace("{s}", "")] * TEMPLATE_COUNT
        # The same words inside a text, where the first one is preceded by a space.
        yield from [" " + wording.replace("{s}", "").strip()] * TEMPLATE_COUNT
    for country in countries:
        for relation, (_, answers) in facts(country).items():
            for answer in answers:
                yield from [ending(answer)] * ANSWER_COUNT[relation]


def train_tokenizer(countries):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[TEXT_END, PADDING], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(weighted_words(countries), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{TEXT_END} $A", pair=f"{TEXT_END} $A $B:1", special_tokens=[(TEXT_END, TEXT_END_ID)])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"vocabulary of {tokenizer.get_vocab_size()}, not {VOCABULARY}")
    return tokenizer


def word_pieces(tokenizer):
    """Ids of the pieces made of letters: those that begin a word (a space and letters), and all of them."""
    letters = [(i, piece.startswith("Ġ")) for piece, i in tokenizer.get_vocab().items()
               if i > PADDING_ID and tokenizer.decode([i]).strip().isalpha()]
    return sorted(i for i, begins in letters if begins), sorted(i for i, _ in letters)
