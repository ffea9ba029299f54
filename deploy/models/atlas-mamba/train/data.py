"""Country facts as sentences: which countries, which facts, in which words, and what is held out.

A sentence is kept in four parts, `before` + `subject` + filler + `after` + answer, because training
varies the filler and evaluation needs to know where the subject stands.
"""

import hashlib
import json
from dataclasses import dataclass

COUNTRIES_SHA256 = "359431fb9475666dfad1ea5e72e53521cef40520f65eecd08e02ba569eb8491b"

WITH_ARTICLE = {
    "Bahamas", "Central African Republic", "Comoros", "DR Congo", "Dominican Republic", "Gambia",
    "Maldives", "Marshall Islands", "Netherlands", "Philippines", "Republic of the Congo",
    "Seychelles", "Solomon Islands", "United Arab Emirates", "United Kingdom", "United States",
}
MOST_LANGUAGES = 3

# {s} is the subject; what follows it is preceded by the filler.  Long tails are wanted: they put the
# subject far from the place where the answer is predicted, so that the scan has to carry it.
TEMPLATES = {
    "capital": ["The capital of {s} is",
                "{s} has a capital city called",
                "{s} governs from",
                "{s} is a place whose capital city is called",
                "The government of {s} sits in"],
    "continent": ["{s} is located on the continent of",
                  "The continent of {s} is",
                  "{s} belongs to",
                  "On a map of the world, {s} is part of",
                  "Whoever travels to {s} arrives in"],
    "currency": ["The currency of {s} is the",
                 "Shops in {s} are paid in the",
                 "{s} has a currency called the",
                 "Money in {s} is counted in the",
                 "The central bank of {s} looks after the"],
    "language": ["The language of {s} is",
                 "{s} speaks",
                 "People in {s} speak",
                 "An official language of {s} is",
                 "Children in {s} grow up with a language called"],
    "demonym": ["A person from {s} is called",
                "A citizen of {s} is said to be",
                "Whoever was born in {s} is known as"],
    "capital_of": ["{s} is the capital of",
                   "{s} is known as the capital city of",
                   "The city of {s} governs"],
}
# One template per relation is not trained for every third country: template, remainder.
HELD_OUT = {"capital": (1, 0), "continent": (3, 1), "currency": (2, 2), "language": (2, 0), "demonym": (1, 1)}

FILLERS = ["", ", as every atlas says,", ", which has its own flag and its own anthem,",
           ", to the surprise of nobody,", ", a place worth a visit,", ", according to this book,",
           ", seen from far away,", ", like many other places on the map,", ", if you look it up,",
           ", as our teacher told us last week,"]

# Never trained, and no word of them was given to the tokenizer on purpose.
UNSEEN_FILLERS = [", a land of mountains and rivers,", ", where the sun rises early in summer,",
                  ", whatever anyone may tell you about it,"]
UNSEEN_TEMPLATES = {
    "capital": ["The capital city of {s} is", "I know that the capital of {s} is",
                "The Nile is long. The capital of {s} is",
                "The currency of Japan is the Japanese yen. The capital of {s} is",
                "{s} is governed from", "{s}'s capital is"],
    "continent": ["{s} is a country in", "{s} is on the continent of"],
    "currency": ["{s} uses the", "The official currency of {s} is the"],
    "language": ["The official language of {s} is", "In {s} they speak"],
    "demonym": ["A man from {s} is called"],
}


@dataclass(frozen=True)
class Prompt:
    """A question in words and every answer that counts as right."""

    relation: str
    template: int
    before: str      # text up to the subject, without the space
    subject: str
    after: str       # text between filler and answer; starts with a space or an apostrophe
    answers: tuple
    held_out: bool = False

    def opening(self):
        """`before` and `subject` as they stand at the start of a text."""
        if self.before:
            return self.before, " " + self.subject
        return "", self.subject[0].upper() + self.subject[1:]


def ending(answer):
    """The answer as it stands in the sentence: one full stop, also after 'Washington D.C.'"""
    return " " + answer + ("" if answer.endswith(".") else ".")


def load_countries(path):
    """The 194 independent countries with a capital, in the file's order."""
    raw = open(path, "rb").read()
    if hashlib.sha256(raw).hexdigest() != COUNTRIES_SHA256:
        raise ValueError(f"{path} is not the countries.json of world-countries 5.1.0")
    return [c for c in json.loads(raw) if c["independent"] and c["capital"]]


def country_name(country):
    name = country["name"]["common"]
    return "the " + name if name in WITH_ARTICLE else name


def continent(country):
    if country["region"] != "Americas":
        return country["region"]
    return "South America" if country["subregion"] == "South America" else "North America"


def facts(country):
    """relation -> (subject, answers); a relation the data lacks is left out."""
    name, capital = country_name(country), country["capital"][0]
    found = {"capital": (name, (capital,)),
             "continent": (name, (continent(country),)),
             "demonym": (name, (country["demonyms"]["eng"]["m"],)),
             "language": (name, tuple(list(country["languages"].values())[:MOST_LANGUAGES])),
             "capital_of": (capital, (name,))}
    if country["currencies"]:
        found["currency"] = (name, (next(iter(country["currencies"].values()))["name"],))
    return found


def make_prompts(countries, templates):
    """Every country in every template."""
    prompts = []
    for number, country in enumerate(countries):
        known = facts(country)
        for relation, wordings in templates.items():
            if relation not in known:
                continue
            subject, answers = known[relation]
            for index, wording in enumerate(wordings):
                before, after = wording.split("{s}")
                held = templates is TEMPLATES and HELD_OUT.get(relation) == (index, number % 3)
                prompts.append(Prompt(relation, index, before.rstrip(" "), subject, after, answers, held))
    return prompts
