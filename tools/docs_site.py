"""A hook of MkDocs: links that lead out of docs/ become plain text, because the site has only the pages of docs/.

A link to a file that the checkout does not have is an error, as MkDocs' own check cannot see those files.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_log = logging.getLogger("mkdocs.docs_site")
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)*[\w./-]+)(#[\w-]+)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    docs = Path(config["docs_dir"])
    here = (docs / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        if not target.exists():
            _log.warning("%s links to %s, which is not there", page.file.src_uri, link[2])
        known = target.is_relative_to(docs) and files.get_file_from_path(target.relative_to(docs).as_posix())
        return link[0] if known and not known.inclusion.is_excluded() else link[1]

    return _LINK.sub(replaced, markdown)
