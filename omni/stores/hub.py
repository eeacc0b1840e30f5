"""Models at the Hugging Face Hub, by `huggingface_hub`: its credentials, its cache (`HF_HOME`), its offline mode.

    hf://owner/name            the branch main
    hf://owner/name@v1         a branch, a tag or a commit
    hf://owner/name/folder     a folder in it

Of a repository only the files of a model folder are brought here: JSON and safetensors. Nothing in it is run, and a folder
whose configuration lists other kinds of files is refused. Data sets (`hf://datasets/…`) are read by `omni.stores.drivers`.
"""

from __future__ import annotations

import glob
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from omni.errors import PackageError, UserError
from omni.stores.tries import TRIES, MissingError, may_pass, reason, stall_seconds, tried
from omni.utils.remote import shown

LOG = logging.getLogger(__name__)

MODEL = re.compile(
    r"hf://(?:models/)?(?P<repo>(?!(?:models|datasets|spaces|buckets|kernels)/)[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/[\w-]+/[\w.-]+|[^/@]+))?(?:/(?P<inner>.+))?"
)
KINDS = (".json", ".safetensors")
"""Ends of the names of files that are read: nothing in them can run."""
PATTERNS = (
    "config.json", "model.safetensors", "tokenizer.json", "codec/*.json", "codec/*.safetensors",
    "adapters/*/adapter_config.json", "adapters/*/adapter_model.safetensors",
)  # fmt: skip
"""Files of a model folder that are brought here, as patterns of `fnmatch`."""
CARD = "README.md"
"""The model card."""
LOOKS = 2  # tries to look at a repository of which something is in the cache already

Result = TypeVar("Result")


@dataclass(frozen=True)
class HubAddress:
    """A model at the hub.

    Attributes:
        address: as it was given.
        repo: `owner/name`.
        revision: a branch, a tag or a commit; None for the branch main.
        inner: folder or file in it; "" for all of it.
    """

    address: str
    repo: str
    revision: str | None = None
    inner: str = ""

    def __str__(self) -> str:
        return shown(self.address)

    @property
    def page(self) -> str:
        """The repository's page."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repo}"


def parse_hub(address: str) -> HubAddress | None:
    """The parts of an address of a model at the hub; None for any other address."""
    match = MODEL.fullmatch(address)
    return None if match is None else HubAddress(address, match["repo"], match["revision"], match["inner"] or "")


# --- reading ------------------------------------------------------------------------------------------------------------


def snapshot(at: HubAddress) -> Path:
    """The folder of a model in the hub's cache, where what is lacking of it is brought first. MissingError: there is no such
    repository, revision or folder, or it is private and there is no token for it. UserError: it cannot be read, or lists files
    that are not read. Where the hub cannot be reached, what is in the cache is taken, with a line in the log."""
    api = _hub().HfApi()
    from huggingface_hub import constants

    start = f"{glob.escape(at.inner.rstrip('/'))}/" if at.inner else ""
    patterns = [f"{start}{pattern}" for pattern in PATTERNS] + ([start.rstrip("/")] if start else [])
    options = {"repo_id": at.repo, "revision": at.revision, "allow_patterns": patterns}
    tries = LOOKS if _kept(options) else TRIES
    try:
        info = _asked(at, lambda: api.repo_info(at.repo, revision=at.revision, timeout=stall_seconds()), tries=tries)
    except UserError as error:
        kept = _kept(options)
        if kept is None or not (error.again or constants.HF_HUB_OFFLINE):
            raise
        LOG.warning("%s: the hub is not reached, and what is in the cache is used (%s)", at, kept)
        return _checked(at, kept)

    def bring() -> Path:
        folder = Path(_hub().snapshot_download(etag_timeout=stall_seconds(), tqdm_class=_bars(), **options))
        if folder.name != info.sha:  # the library falls back on an older one
            raise ConnectionError(f"commit {info.sha} did not come")
        return folder

    return _checked(at, _asked(at, bring))


def _kept(options: Mapping[str, Any]) -> Path | None:
    """The folder of a model in the cache; None where it is not there, or not whole."""
    try:
        return Path(_hub().snapshot_download(local_files_only=True, **options))
    except (OSError, ValueError):
        return None


def _checked(at: HubAddress, path: Path) -> Path:
    """The folder or file of an address in a snapshot, where the files that it lists are of kinds that are read."""
    if ".." in PurePosixPath(at.inner).parts:
        raise UserError(f"{at} leads out of its repository: name a folder in it")
    path = path / at.inner
    if not path.exists():
        raise MissingError(
            f"{at} has no config.json, so that it is no model folder: check the name (data are at hf://datasets/owner/name)"
        )
    listed: Any = {}
    with suppress(OSError, ValueError, AttributeError):  # what is wrong with it is told where it is read
        listed = json.loads((path / "config.json").read_bytes()).get("files", {})
    other = [name for name in listed if not str(name).endswith(KINDS)] if isinstance(listed, Mapping) else []
    if other:
        raise UserError(
            f"{at}/{str(other[0])[:80]} is not read from the hub, only JSON and safetensors are: a pickle could run code; ask "
            "its author for safetensors (`omni-train convert` writes them)"
        )
    return path


def read_card(at: HubAddress) -> str | None:
    """The model card that is at the hub; None where there is none."""
    from huggingface_hub.errors import EntryNotFoundError

    def work() -> str | None:
        try:
            file = _hub().hf_hub_download(at.repo, CARD, revision=at.revision, etag_timeout=stall_seconds())
        except EntryNotFoundError as error:
            if isinstance(error, FileNotFoundError):  # it was not reached
                raise ConnectionError(str(error)) from error
            return None
        return Path(file).read_text(encoding="utf-8", errors="replace")

    return _asked(at, work)


# --- writing ------------------------------------------------------------------------------------------------------------


def account(at: HubAddress) -> str:
    """The name of the account whose token is used; UserError where there is none, or it is not valid."""
    return str(_asked(at, lambda: _hub().HfApi().whoami(), "written")["name"])


def is_private(at: HubAddress) -> bool | None:
    """Whether a repository is private; None where there is none that is seen with this token."""
    try:
        return bool(_asked(at, lambda: _hub().HfApi().repo_info(at.repo, timeout=stall_seconds()), "written").private)
    except MissingError:
        return None


def check_card(at: HubAddress, card: str) -> None:
    """UserError where the hub refuses a card's front matter."""

    def work() -> None:
        try:
            _hub().ModelCard(card, ignore_metadata_errors=True).validate()
        except ValueError as error:
            if isinstance(error, OSError):  # an answer of HTTP
                raise
            raise UserError(f"{at}: its card is refused: {' '.join(str(error).split())[:500]}") from error

    _asked(at, work, "written")


def create_repository(at: HubAddress, private: bool | None) -> None:
    """Make a repository; None is public, or what the organisation's settings say. UserError where that is refused."""
    _asked(at, lambda: _hub().HfApi().create_repo(at.repo, private=private, exist_ok=True), "made")


def upload(at: HubAddress, files: Sequence[tuple[str, Path | bytes]], message: str) -> str:
    """Write files in one commit, so that all of them are seen or none, on a branch that is made of main where it is not there;
    returns its page. What the hub has already is not sent. UserError: it is refused, or goes on failing; what was sent is not
    sent again by the next try.

    Args:
        files: names in the repository, and paths or contents, in order.
    """
    hub, api = _hub(), _hub().HfApi()

    def work() -> str:
        if at.revision is not None and not at.revision.startswith("refs/"):
            api.create_branch(at.repo, branch=at.revision, exist_ok=True)
        additions = [hub.CommitOperationAdd(name, data if isinstance(data, bytes) else str(data)) for name, data in files]
        done = api.create_commit(at.repo, additions, commit_message=message, revision=at.revision)
        return str(done.commit_url)

    return _asked(at, work, "written")


# --- the library --------------------------------------------------------------------------------------------------------


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise PackageError('hf:// needs the package huggingface_hub: pip install "omni-speech[hub]"') from error
    return huggingface_hub


def _bars() -> Any:
    """The hub's progress bars, with the time left beside the rate; they are shown on terminals alone."""
    from huggingface_hub.utils import tqdm

    class Bars(tqdm):  # type: ignore[misc]
        def __init__(self, *values: Any, **named: Any) -> None:
            named.pop("bar_format", None)
            super().__init__(*values, **{"disable": None} | named)

    return Bars


REFUSALS = {
    "OfflineModeIsEnabled": "{at} cannot be {doing}: HF_HUB_OFFLINE is set, and it is not in the cache; unset it",
    "LocalEntryNotFoundError": "{at} cannot be {doing}: {reason}; check the address and the network",
    "BadRequestError": "{at} cannot be {doing}: {text}",
    "LocalTokenNotFoundError": "{at} cannot be {doing} without a token: run `hf auth login`, or set HF_TOKEN",
    "HFValidationError": "{at} is no name that the hub has: {text}",
    "GatedRepoError": "{at} asks for consent first: give it on {at.page}, and run `hf auth login`",
    "RevisionNotFoundError": "{at}: {at.repo} has no branch, tag or commit {at.revision!r}; check it",
    "RepositoryNotFoundError": "{at} is not there, or is private: check the name; for a private one run `hf auth login`, or "
    "set HF_TOKEN",
}
"""What users are told about errors of the library, by their names or their bases'."""


def _asked(at: HubAddress, work: Callable[[], Result], doing: str = "read", tries: int = TRIES) -> Result:
    """The result of a request, which is made again while its failure may pass; UserError and MissingError say what to do."""
    _hub()

    def once() -> Result:
        try:
            return work()
        except Exception as error:
            name = next((base.__name__ for base in type(error).__mro__ if base.__name__ in REFUSALS), "")
            if not name or (name == "LocalEntryNotFoundError" and may_pass(error)):
                raise
            text = " ".join(str(error).split())[:500]
            missing = name in ("RevisionNotFoundError", "RepositoryNotFoundError")
            refusal = REFUSALS[name].format(at=at, doing=doing, text=text, reason=reason(error))
            raise (MissingError if missing else UserError)(refusal) from error

    return tried(once, at.address, doing, tries)
