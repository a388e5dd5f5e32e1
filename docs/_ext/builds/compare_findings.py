"""Compare the findings of two builds: python compare_findings.py OLD NEW

OLD and NEW are sites, or their findings.json. Listed are the findings of which another alternative
is true now, and those that only one build has.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path


def read(place: Path) -> dict[str, tuple[str, str]]:
    """Return the alternative and the sentence of each finding, by chapter and name."""
    file = place / "findings.json" if place.is_dir() else place
    return {
        f"{page}: {found['name']}": (found["side"], found["text"])
        for page, findings in json.loads(file.read_text(encoding="utf-8")).items()
        for found in findings
    }


def changes(old: dict[str, tuple[str, str]], new: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Say, of each finding that changed sides, what each build found."""
    for finding in sorted(old.keys() | new.keys()):
        before, after = old.get(finding), new.get(finding)
        if before and after and before[0] == after[0]:
            continue
        yield finding
        for build, found in (("old", before), ("new", after)):
            yield f"  {build}: {f'({found[0]}) {found[1]}' if found else 'not there'}"


def main(old: str, new: str) -> None:
    """Print the changes, and how many findings there are."""
    first, second = read(Path(old)), read(Path(new))
    lines = list(changes(first, second))
    print("\n".join(lines or ["no finding changed sides"]))
    both = len(first.keys() & second.keys())
    print(f"{len(first)} findings in the old build, {len(second)} in the new, {both} in both")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
