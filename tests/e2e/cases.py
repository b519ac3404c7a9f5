"""Fifty prompts that differ in what has gone wrong elsewhere: length around block edges, script,
shape of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK = 64
LENGTHS = (
    *(1, 2, 3, 17, BLOCK - 1, BLOCK, BLOCK + 1),
    *(2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 5),
    *(511, 512, 513, 1100, 2100),
)
QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits.",
    "Why is the sky blue? Answer in one sentence.",
    "Write a haiku about autumn rain.",
    "Translate 'good morning' into Spanish.",
    "List the first five prime numbers.",
    "What does a database index do?",
    "Give me a recipe for pancakes.",
    "Explain recursion to a child.",
    "Who wrote Hamlet?",
    "2 + 2 * 3 = ?",
    "Write a Python function that reverses a string.",
)
SCRIPTS = (
    "Was ist ein Schmetterling? Grüße aus Köln!",
    "日本の首都はどこですか。",
    "한국어로 인사해 주세요.",
    "ما هي عاصمة مصر؟",
    "Describe this: 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200bzero width",
    'Ω≈ç√∫ and \\n \\t "quotes" {json: [1, 2]}',
)


@dataclass(frozen=True)
class Case:
    """One prompt and the fields of its request; ``messages`` or ``prompt`` (text, ids) is set."""

    name: str
    messages: tuple[dict[str, str], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def prose(tokens: int) -> str:
    """English text of at least ``tokens`` tokens in which no two sentences are equal."""
    subjects = ("The river", "A merchant", "Every winter the town", "An old map", "The engineer")
    verbs = ("carried", "described", "forgot", "measured", "returned")
    objects = ("salt", "a bridge of nine arches", "letters from the coast", "the northern road")
    return " ".join(
        f"{subjects[i % 5]} {verbs[i * 7 % 5]} {objects[i * 3 % 4]} in the year {1200 + i}."
        for i in range(tokens // 15 + 2)
    )


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def cases(corpus: Sequence[int]) -> list[Case]:
    """The cases; ``corpus`` are ids of running text, twice as many as the longest prompt."""
    found = [Case(f"length-{n}", prompt=tuple(corpus[n : 2 * n])) for n in LENGTHS]
    found += [Case(f"chat-{i}", user(text)) for i, text in enumerate(QUESTIONS)]
    found += [Case(f"script-{i}", user(text)) for i, text in enumerate(SCRIPTS)]
    found += [Case(f"script-plain-{i}", prompt=text) for i, text in enumerate(SCRIPTS[1:5])]
    found += [
        Case("system", ({"role": "system", "content": "Answer as a pirate."}, *user("Hello"))),
        Case(
            "turns",
            (
                *user("My name is Ada."),
                {"role": "assistant", "content": "Nice to meet you, Ada."},
                *user("What is my name?"),
            ),
        ),
        Case("one-token", user("Say yes."), fields={"max_tokens": 1}),
        Case("two-tokens", user("Say yes."), fields={"max_tokens": 2}),
        Case("three-tokens", user("Count to three."), fields={"max_tokens": 3}),
        Case("n-2", user("Tell me a joke."), fields={"n": 2}),
        Case("n-3-block", prompt=tuple(corpus[: 2 * BLOCK]), fields={"n": 3}),
        Case("n-3-one-token", prompt=tuple(corpus[:40]), fields={"n": 3, "max_tokens": 1}),
        Case("stop-word", user("Count from one to ten in words."), fields={"stop": ["three"]}),
        Case("stop-two", prompt="One, two, three, four, five,", fields={"stop": [",", "\n"]}),
        Case("long-answer", user("Tell me about the moon."), fields={"max_tokens": 80}),
    ]
    return found
