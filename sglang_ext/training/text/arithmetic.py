"""School mathematics with worked steps, made from a seed; every answer is computed, not written."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import gcd

from sglang_ext.training.text.documents import Text

_NAMES = [
    "Ana",
    "Ben",
    "Carla",
    "David",
    "Elif",
    "Farid",
    "Grace",
    "Hiro",
    "Ines",
    "Jonas",
    "Kofi",
    "Lena",
    "Mateo",
    "Nora",
    "Omar",
    "Priya",
]
_THINGS = ["apples", "pencils", "tickets", "books", "stamps", "bottles", "cards", "boxes", "tiles", "seeds"]


def problems(seed: int, size: int) -> Iterator[Text]:
    """Different problems of every kind until ``size`` bytes; the group is the question itself."""
    draw = random.Random(seed)
    asked: set[str] = set()
    written = 0
    while written < size:
        kind = draw.choice(KINDS)
        question, steps, answer = kind(draw)
        if question in asked:
            continue
        asked.add(question)
        response = "\n".join([*(f"Step {k}: {step}" for k, step in enumerate(steps, 1)), f"Answer: {answer}"])
        written += len(question) + len(response)
        yield Text(f"math/{question}", f"{kind.__name__}/{len(asked)}", question, response)


def _signed(number: int) -> str:
    return f"+ {number}" if number >= 0 else f"- {-number}"


def addition(draw: random.Random) -> tuple[str, list[str], str]:
    a, b = draw.randint(100, 99_999), draw.randint(100, 99_999)
    steps, carry, x, y = [], 0, a, b
    while x or y or carry:
        total = x % 10 + y % 10 + carry
        step = f"{x % 10} + {y % 10}" + (f" + carry {carry}" if carry else "") + f" = {total}, write {total % 10}"
        carry = total // 10
        steps.append(step + (f", carry {carry}." if carry else "."))
        x, y = x // 10, y // 10
    return f"Compute {a} + {b}.", steps, str(a + b)


def multiplication(draw: random.Random) -> tuple[str, list[str], str]:
    a, b = draw.randint(12, 999), draw.randint(12, 99)
    ones, tens = b % 10, b - b % 10
    steps = [f"Split {b} = {tens} + {ones}.", f"{a} x {tens} = {a * tens}.", f"{a} x {ones} = {a * ones}."]
    return f"Compute {a} x {b}.", [*steps, f"{a * tens} + {a * ones} = {a * b}."], str(a * b)


def linear_equation(draw: random.Random) -> tuple[str, list[str], str]:
    name, a, x, b = draw.choice("xyzntk"), draw.randint(2, 15), draw.randint(-20, 20), draw.randint(-50, 50)
    c = a * x + b
    steps = [
        f"Subtract {b} from both sides: {a}{name} = {c} - ({b}) = {c - b}.",
        f"Divide both sides by {a}: {name} = {c - b}/{a} = {x}.",
        f"Check: {a} x ({x}) {_signed(b)} = {a * x} {_signed(b)} = {c}.",
    ]
    return f"Solve {a}{name} {_signed(b)} = {c} for {name}.", steps, f"{name} = {x}"


def greatest_common_divisor(draw: random.Random) -> tuple[str, list[str], str]:
    a, b = sorted((draw.randint(20, 5000), draw.randint(20, 5000)), reverse=True)
    steps, x, y = [], a, b
    while y:
        steps.append(f"{x} = {x // y} x {y} + {x % y}.")
        x, y = y, x % y
    return f"Find the greatest common divisor of {a} and {b}.", steps, str(x)


def fractions(draw: random.Random) -> tuple[str, list[str], str]:
    a, b = (Fraction(draw.randint(1, 20), draw.randint(2, 20)) for _ in range(2))
    common = a.denominator * b.denominator // gcd(a.denominator, b.denominator)
    p, q = int(a * common), int(b * common)
    steps = [
        f"The common denominator of {a.denominator} and {b.denominator} is {common}.",
        f"{a} = {p}/{common} and {b} = {q}/{common}.",
        f"{p}/{common} + {q}/{common} = {p + q}/{common}.",
        f"In lowest terms this is {a + b}.",
    ]
    return f"Compute {a} + {b}.", steps, str(a + b)


def story(draw: random.Random) -> tuple[str, list[str], str]:
    first, second = draw.sample(_NAMES, 2)
    things = draw.choice(_THINGS)
    own, bags, each = draw.randint(5, 90), draw.randint(2, 12), draw.randint(2, 9)
    sold = draw.randint(1, own)
    total = own + bags * each
    question = (
        f"{first} has {own} {things}. {second} gives {first} {bags} bags with {each} {things} in each bag. "
        f"{first} then sells {sold} {things}. How many {things} does {first} have now?"
    )
    steps = [
        f"{second} gives {bags} x {each} = {bags * each} {things}.",
        f"{first} then has {own} + {bags * each} = {total} {things}.",
        f"After selling {sold}, {first} has {total} - {sold} = {total - sold} {things}.",
    ]
    return question, steps, str(total - sold)


def percentage(draw: random.Random) -> tuple[str, list[str], str]:
    percent, whole = draw.randint(1, 19) * 5, draw.randint(2, 400) * 20
    steps = [f"{percent}% means {percent}/100.", f"{percent} x {whole} = {percent * whole}."]
    return (
        f"What is {percent}% of {whole}?",
        [*steps, f"{percent * whole} / 100 = {percent * whole // 100}."],
        str(percent * whole // 100),
    )


def factoring(draw: random.Random) -> tuple[str, list[str], str]:
    a, b = draw.randint(-30, 30), draw.randint(-30, 30)
    factors = f"(x {_signed(a)})(x {_signed(b)})"
    quadratic = f"x^2 {_signed(a + b)}x {_signed(a * b)}"
    steps = [
        f"Find two numbers with product {a * b} and sum {a + b}.",
        f"({a}) x ({b}) = {a * b} and ({a}) + ({b}) = {a + b}.",
        f"So {quadratic} = {factors}.",
    ]
    return f"Factor {quadratic}.", steps, factors


def sequence(draw: random.Random) -> tuple[str, list[str], str]:
    start, step = draw.randint(1, 200), draw.choice([-1, 1]) * draw.randint(2, 60)
    terms = [start + step * k for k in range(5)]
    following = [terms[-1] + step * k for k in (1, 2, 3)]
    steps = [f"The difference is {terms[1]} - {terms[0]} = {step}."]
    steps += [f"{term - step} {_signed(step)} = {term}." for term in following]
    shown = ", ".join(map(str, terms))
    return f"Give the next three terms: {shown}.", steps, ", ".join(map(str, following))


def long_division(draw: random.Random) -> tuple[str, list[str], str]:
    divisor, number = draw.randint(3, 25), draw.randint(1000, 99_999)
    steps, rest = [], 0
    for digit in str(number):
        whole = rest * 10 + int(digit)
        rest = whole % divisor
        steps.append(f"{whole} / {divisor} = {whole // divisor}, rest {rest}.")
    return f"Divide {number} by {divisor} with rest.", steps, f"{number // divisor} rest {number % divisor}"


KINDS: tuple[Callable[[random.Random], tuple[str, list[str], str]], ...] = (
    addition,
    multiplication,
    linear_equation,
    greatest_common_divisor,
    fractions,
    story,
    percentage,
    factoring,
    sequence,
    long_division,
)
