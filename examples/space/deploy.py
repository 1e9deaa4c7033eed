"""Deploy the studio as a Hugging Face Space: python examples/space/deploy.py me/coram-studio

The Space is private unless --public is given. The token is that of `hf auth login`, or HF_TOKEN.
"""

import argparse
import shutil
import tempfile
import tomllib
from pathlib import Path

from huggingface_hub import HfApi

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def requirements() -> list[str]:
    """What the package and its studio need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["studio"]]


def stage(folder: Path) -> Path:
    """Fill a folder with all that the Space needs: app, card, requirements, and the package itself."""
    for name in ("app.py", "README.md"):
        shutil.copy(HERE / name, folder)
    shutil.copy(ROOT / "LICENSE", folder)
    shutil.copytree(ROOT / "coram_hf", folder / "coram_hf", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "requirements.txt").write_text("\n".join(requirements()) + "\n", encoding="utf-8")
    return folder


def deploy(space: str, *, private: bool = True) -> str:
    """Create or update the Space, and return its address."""
    api = HfApi()
    address = api.create_repo(space, repo_type="space", space_sdk="gradio", private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        api.upload_folder(
            folder_path=stage(Path(folder)),
            repo_id=address.repo_id,
            repo_type="space",
            commit_message="The studio",
        )
    return str(address)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("space", help="org/name")
    parser.add_argument("--public", action="store_true", help="let everybody see and use a new Space")
    given = parser.parse_args()
    print(f"deployed to {deploy(given.space, private=not given.public)}")
