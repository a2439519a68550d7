"""What the demo asks: one prompt of each kind that people speed up, and a batch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A prompt of the demo."""

    kind: str
    text: str
    chat: bool = True
    """whether it is a question for the chat template, or a text to continue"""


SAMPLES = (
    Sample("chat", "How do I keep basil alive on my kitchen windowsill? Please give me a few simple steps."),
    Sample(
        "code",
        'def read_table(path):\n    """Read a CSV file and return a list of dictionaries, one for each row."""\n',
        chat=False,
    ),
    Sample(
        "edit",
        "Rename the variable `n` to `count` in this code and change nothing else:\n\n"
        "```python\ndef mean_of_file(path):\n    total, n = 0.0, 0\n    with open(path) as lines:\n"
        "        for line in lines:\n            if line.strip():\n                total += float(line)\n"
        "                n += 1\n    return total / n if n else 0.0\n```",
    ),
    Sample(
        "summary",
        "Summarize this text in a few sentences:\n\n"
        "The old lighthouse at Farrow Point will open to visitors in spring. It was built in 1868 after three ships "
        "were lost on the rocks in a single winter, and its lamp could be seen from twenty miles away. When the lamp "
        "was made automatic in 1983 the last keeper moved out, and the building stood empty for almost forty years. "
        "A group of people from the village collected money to repair the roof and the spiral staircase. Visitors "
        "will be able to climb to the lamp room, sleep in the keeper's house, and see a small exhibition about the "
        "ships that were lost.",
    ),
)

BATCH = (
    "What is photosynthesis?",
    "Write a short poem about the sea.",
    "Name three ways to save water at home.",
    "Explain what a prime number is, with an example.",
)
"""questions that are answered together"""
