"""What the demo continues: the kinds of text that the embedded pair was trained on."""

PROMPTS = {
    "code": (
        'import os\n\n\ndef list_files(path, suffix=".txt"):\n'
        '    """Return the names of all files below a folder that end with a suffix."""\n'
        "    result = []\n    for"
    ),
    "a sum": (
        "Question: A baker makes 24 rolls in the morning and twice as many in the afternoon. She sells 50 of them. "
        "How many rolls are left?\nAnswer:"
    ),
    "another sum": (
        "Question: A train has 8 cars with 40 seats each. 275 seats are taken. How many seats are free?\nAnswer:"
    ),
    "data to text": (
        "Meaning: name[The Old Mill], eatType[restaurant], food[French], priceRange[moderate], area[city centre], "
        "familyFriendly[no], near[Crown Square]\nText:"
    ),
}
