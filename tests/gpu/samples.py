"""What the models are asked: code, sums, descriptions and copies, as the pair in `tests/pair` knows them."""

from typing import NamedTuple


class Sample(NamedTuple):
    kind: str
    text: str


SAMPLES = (
    Sample("code", 'def read_table(path):\n    """Read a CSV file and return a list of dictionaries, one a row."""\n'),
    Sample(
        "maths",
        "Question: Mia buys 4 boxes of 6 pencils and gives 5 pencils to her brother. How many pencils has she left?\n"
        "Answer:",
    ),
    Sample("text", "Meaning: name[The Plough], eatType[pub], food[Italian], priceRange[cheap], near[the river]\nText:"),
    Sample(
        "copy",
        "def mean(values):\n    total, n = 0.0, 0\n    for value in values:\n        total += value\n        n += 1\n"
        "    return total / n if n else 0.0\n\n\ndef mean_of_squares(values):\n    total, n = 0.0, 0\n",
    ),
    Sample("code", "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"),
    Sample(
        "maths",
        "Question: A train travels 60 miles in an hour. It travels for 3 hours, rests, and travels for 2 hours more. "
        "How many miles has it travelled?\nAnswer:",
    ),
    Sample(
        "copy",
        "import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--width', type=int, default=8)\n"
        "parser.add_argument('--height', type=int, default=8)\nparser.add_argument('--depth', type=int",
    ),
    Sample("text", "Meaning: name[Blue Spice], eatType[coffee shop], customer rating[5 out of 5]\nText:"),
    Sample("chat", "How do I keep basil alive on my kitchen windowsill? Please give me a few simple steps.\n"),
    Sample("code", "import os\nimport sys\n\n\ndef main(argv=None):\n    parser ="),
    Sample(
        "copy",
        "Meaning: name[The Mill], eatType[pub], near[the park]\nText: The Mill is a pub near the park.\n"
        "Meaning: name[The Vaults], eatType[pub], near[the park]\nText:",
    ),
    Sample(
        "maths",
        "Question: Tom has 12 apples. He eats 2 of them a day for 4 days. How many apples are left?\nAnswer: He eats",
    ),
)
