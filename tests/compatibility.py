"""The tables of docs/compatibility.md, written from what the tests themselves find.

PYTHONPATH=src:tests python tests/compatibility.py [SECTION ...]
"""

import sys
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "compatibility.md"


def read(section: str) -> str:
    """What stands between the section's markers."""
    text = DOCUMENT.read_text()
    return text.split(f"<!-- begin: {section} -->\n")[1].split(f"<!-- end: {section} -->")[0]


def write(section: str, table: str) -> None:
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text.replace(f"{section} -->\n{read(section)}<!--", f"{section} -->\n{table}<!--"))


def policies() -> str:
    import policy_families

    return policy_families.table(policy_families.try_all(), policy_families.drafts_in_engine)


def peft() -> str:
    import peft_kinds

    return peft_kinds.table(peft_kinds.try_all())


def sampling() -> str:
    from hf_codraft.serving.sampling import REFUSED, SERVED

    lines = ["| option | with a draft | |", "|---|---|---|"]
    lines += [f"| `{name}` | lossless (tested) | {shown} |" for name, shown in SERVED.items()]
    lines += [f"| `{name}` | refused | {refusal.reason} |" for name, refusal in REFUSED.items()]
    return "\n".join(lines) + "\n"


SECTIONS = {"policies": policies, "peft": peft, "sampling": sampling}

if __name__ == "__main__":
    for name in sys.argv[1:] or SECTIONS:
        write(name, SECTIONS[name]())
