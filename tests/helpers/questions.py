"""Questions in the letters of the tests' tokenizer."""

LETTERS = "abcdefghi"
QUESTIONS = [LETTERS[i % 9 :] + LETTERS[: i % 7] * (1 + i % 3) + LETTERS[i // 9] for i in range(60)]
