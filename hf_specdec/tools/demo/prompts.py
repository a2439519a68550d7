"""What the demo asks: questions that its model answers without repeating itself."""

SAMPLES = {
    "chat": "How do vaccines work?",
    "code": "Write a Python class for a bank account with deposit and withdraw.",
    "summary": (
        "Summarize this text in a few sentences:\n\n"
        "The old lighthouse at Farrow Point will open to visitors in spring. It was built in 1868 after three ships "
        "were lost on the rocks in a single winter, and its lamp could be seen from twenty miles away. When the lamp "
        "was made automatic in 1983 the last keeper moved out, and the building stood empty for almost forty years. "
        "A group of people from the village collected money to repair the roof and the spiral staircase. Visitors "
        "will be able to climb to the lamp room, sleep in the keeper's house, and see a small exhibition about the "
        "ships that were lost."
    ),
}

BATCH = (
    "What is photosynthesis?",
    "Write a short letter to a friend about a walk in the woods.",
    "What is the difference between weather and climate?",
    "Explain what a prime number is, with an example.",
)
"""questions that are answered together"""
