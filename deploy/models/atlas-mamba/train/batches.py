"""Training sequences: sentences with varying fillers, disturbed, joined, sorted by length and padded."""

from dataclasses import dataclass

import numpy as np
import torch

from bpe import PADDING_ID, TEXT_END_ID, word_pieces
from data import FILLERS, ending

BATCH = 24
ANSWER_WEIGHT = 4.0
NO_FILLER = 0.25        # else one of the others: people mostly ask without one
JOINED = 0.1
MOST_PIECES = 18        # of a random filler; unseen fillers are spelt in many short pieces

# Weight of a token in the loss.  Random pieces cannot be predicted, so they only cost.
PLAIN, RANDOM = 1.0, 0.0


@dataclass
class Disturbance:
    """How often a sentence is disturbed; all 0 until the facts begin to sit."""

    random_filler: float = 0.0    # its filler is random pieces between commas
    inserted: float = 0.0         # random pieces stand between the words of its predicate
    opened: float = 0.0           # random pieces stand before it


class Builder:
    """Turns prompts into token ids and loss weights."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.word_starts, self.pieces = map(np.array, word_pieces(tokenizer))
        self.begins_word = set(self.word_starts.tolist())
        self.cache = {}

    def encode(self, text):
        if text not in self.cache:
            self.cache[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.cache[text]

    @staticmethod
    def draw(rng, pieces, most):
        """1 to `most` random pieces that nothing in the loss asks for."""
        return [(int(i), RANDOM) for i in rng.choice(pieces, size=rng.integers(1, most + 1))]

    def filler(self, rng, disturbance):
        """(token, weight) pairs between subject and predicate."""
        if rng.random() < disturbance.random_filler:
            comma = (self.encode(",")[0], PLAIN)
            return [comma, *self.draw(rng, self.pieces, MOST_PIECES), comma]
        if rng.random() < NO_FILLER:
            return []
        return [(i, PLAIN) for i in self.encode(FILLERS[rng.integers(1, len(FILLERS))])]

    def insert_pieces(self, rng, tokens):
        """Random pieces before one of the words; never after the last one, where the answer begins."""
        places = [k for k, (i, _) in enumerate(tokens) if i in self.begins_word]
        if not places:
            return tokens
        at = places[rng.integers(len(places))]
        return tokens[:at] + self.draw(rng, self.word_starts, 2) + tokens[at:]

    def sentence(self, rng, prompt, disturbance, inside):
        """(token, weight) pairs of one sentence; `inside` a text, its first word follows a space."""
        before, subject = prompt.opening()
        start = []
        if rng.random() < disturbance.opened:
            start = self.draw(rng, self.word_starts, 3)
            before = before[:1].lower() + before[1:]
            subject = subject if before else prompt.subject
            inside = True
        if inside and before:
            before = " " + before
        elif inside:
            subject = " " + subject
        plain = lambda text: [(i, PLAIN) for i in self.encode(text)]
        before, after = plain(before), plain(prompt.after)
        if rng.random() < disturbance.inserted:
            before = self.insert_pieces(rng, before)
        if rng.random() < disturbance.inserted:
            after = self.insert_pieces(rng, after)
        answer = prompt.answers[rng.integers(len(prompt.answers))]
        return [*start, *before, *plain(subject), *self.filler(rng, disturbance), *after,
                *((i, ANSWER_WEIGHT) for i in self.encode(ending(answer)))]

    def epoch(self, rng, prompts, disturbance):
        """Every prompt once, in random order; sequences of (token, weight), end token first and last."""
        sequences, order, k = [], rng.permutation(len(prompts)), 0
        while k < len(order):
            count = 2 if rng.random() < JOINED and k + 1 < len(order) else 1
            sequence = [(TEXT_END_ID, 0.0)]
            for part in range(count):
                sequence += self.sentence(rng, prompts[order[k + part]], disturbance, part > 0)
            sequences.append(sequence + [(TEXT_END_ID, PLAIN)])
            k += count
        return sequences


def padded(sequences):
    """Token ids [B, L] and the weight of each as a target [B, L]."""
    length = max(map(len, sequences))
    ids, weights = np.full((len(sequences), length), PADDING_ID), np.zeros((len(sequences), length), np.float32)
    for row, sequence in enumerate(sequences):
        ids[row, :len(sequence)], weights[row, :len(sequence)] = zip(*sequence)
    return torch.from_numpy(ids), torch.from_numpy(weights)


def batches(rng, sequences):
    """Batches of sequences of about one length, in random order."""
    near = sorted(sequences, key=lambda s: len(s) + rng.random())
    groups = [near[k:k + BATCH] for k in range(0, len(near), BATCH)]
    for k in rng.permutation(len(groups)):
        yield padded(groups[k])
