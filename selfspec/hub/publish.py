"""Files to a repository on the hub. Called by `selfspec heads push`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from selfspec.errors import CannotWrite, first_line


def push(files: Mapping[str, str | bytes], name: str, *, private: bool, message: str) -> str:
    """Make the repository where there is none, add the files; gives its address.

    Raises CannotWrite with what the hub says.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for file, content in files.items():
                data = content.encode() if isinstance(content, str) else content
                (Path(folder) / file).write_bytes(data)
            address = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except (OSError, HFValidationError) as error:  # those of the hub are OSErrors
        raise CannotWrite(
            f"cannot put heads at {name}: {first_line(error)}. Is the id yours, and are you logged "
            "in (hf auth login)?"
        ) from error
    return str(address)
