"""What the documents print: their pages, snippets and commands, and small things that stand for what these name."""

import json
import re
import shlex
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md")))]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
ROWS = {
    "openai/openai_humaneval": {"prompt": "def add(a, b):\n"},
    "openai/gsm8k": {"question": "What is 1 + 1?", "answer": "It is 2."},
    "google-research-datasets/mbpp": {"text": "Add two numbers.", "code": "def add(a, b):\n", "test_list": ["x"]},
    "knkarthick/dialogsum": {"dialogue": "A: Hello.\nB: Goodbye.", "summary": "They meet."},
    "HuggingFaceH4/mt_bench_prompts": {"prompt": ["Hello.", "Go on."]},
    "tuetschek/e2e_nlg": {"meaning_representation": "name[A]", "human_reference": "It is A."},
}
"""a row of each data set that is named"""


def fences(page: str, language: str) -> list[str]:
    """The blocks of a page in a language."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)


def snippets(page: str) -> list[str]:
    """Python that runs. What is not run is marked ```py."""
    if page.endswith(".ipynb"):
        cells = json.loads((ROOT / page).read_text())["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return fences(page, "python")


def commands(page: str) -> list[str]:
    """Shell commands, each whole: lines go on behind a backslash and in quotes, and variables of the page are named."""
    found, begun, variables = [], "", {}
    for line in "\n".join(fences(page, "sh")).replace("\\\n", " ").splitlines():
        begun = f"{begun}\n{line}" if begun else line.strip()
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:  # a quotation that is open
            continue
        begun = re.sub(r"\$(\w+)", lambda name: variables.get(name[1], name[0]), begun)
        if len(words) == 1 and (assigned := re.fullmatch(r"(\w+)=(.*)", words[0])):
            variables[assigned[1]] = assigned[2]
        elif words:
            found.append(begun)
        begun = ""
    assert not begun, f"{page}: {begun}"
    return found


def stand_ins(folder: Path) -> None:
    """A clone as the documents see it, with the tests' pair for the real model and for what was made for it."""
    for path in ROOT.iterdir():
        if path.name != "hub_configs":
            (folder / path.name).symlink_to(path)
    pair, made = ROOT / "tests" / "pair", folder / "hub_configs"
    draft = made / "draft_model" / "draft_model"
    draft.mkdir(parents=True)
    for path in (pair / "draft").iterdir():
        if "token" not in path.name:  # the ready one has none of its own
            (draft / path.name).symlink_to(path)
    shutil.copy(pair / "draft_model" / "config.json", draft.parent)
    shutil.copytree(pair / "draft", made / "draft")  # which the pair's drafters name, and is no link
    for name in ("hybrid", "ngram", "pearl", "prompt_lookup", "suffix"):
        (made / name).symlink_to(pair / name)
    (made / "disco").symlink_to(pair / "disco-demo")
    real = folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    real.mkdir(parents=True)
    for path in (pair / "target").iterdir():
        (real / path.name).symlink_to(path)
    (real / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "smollm2").symlink_to(real)


def told(value: str | list[str], number: int) -> str | list[str]:
    """A value of another row."""
    return f"{value} {number}" if isinstance(value, str) else [f"{text} {number}" for text in value]


def data_sets(folder: Path) -> None:
    """A folder for each data set, which the library `datasets` reads as it reads a repo of the Hub."""
    for name, row in ROWS.items():
        (folder / name).mkdir(parents=True)
        for split in ("train", "validation", "test"):
            rows = [{key: told(value, number) for key, value in row.items()} for number in range(8)]
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
