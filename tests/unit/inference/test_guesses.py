"""Python by intuition: short calls, and one line for each wrong guess."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from toy_captioner import assert_same

import captioner as package
from captioner import hints
from captioner.caption_types import Caption
from captioner.drawing import viewer
from captioner.drawing.figure import Figure
from captioner.errors import ConfigError, DataError
from captioner.inference import captioner as module
from captioner.inference.captioner import Captioner
from captioner.inference.photo_caption import PhotoCaption
from captioner.options import SearchOptions, TrainConfig

SETTINGS = types.SimpleNamespace(**vars(TrainConfig()))
"""All training settings, without their sections."""
for section in filter(dataclasses.is_dataclass, vars(TrainConfig()).values()):
    vars(SETTINGS).update(vars(section))


def test_a_folder_is_captioned_in_natural_order(
    captioner: Captioner, photos: list[Path], tmp_path: Path
):
    for name in ["2.png", "10.png", "2_attention.png", ".hidden.png", "notes.txt"]:
        (tmp_path / name).write_bytes(photos[0].read_bytes())
    (tmp_path / "empty").mkdir()

    found: Any = captioner.caption(tmp_path)
    several: Any = captioner.captions(str(tmp_path), 2)
    streamed = [*captioner.stream(tmp_path)]

    assert [one.photo.name for one in found] == ["2.png", "10.png"]
    assert [len(captions) for captions in several] == [2, 2]
    assert [Path(str(result.photo)).name for result in streamed] == ["2.png", "10.png"]
    assert repr(streamed[0]).startswith(f"<Result {tmp_path}/2.png: <PhotoCaption '")
    for call in (captioner.caption, captioner.stream):
        with pytest.raises(DataError, match="contains no photos"):
            call(tmp_path / "empty")


def test_a_model_can_be_called(captioner: Captioner, photos: list[Path]):
    assert_same(captioner(photos[0], beam_size=1), captioner.caption(photos[0], beam_size=1))


def test_the_shipped_model_is_loaded_once(
    captioner: Captioner, photos: list[Path], monkeypatch: pytest.MonkeyPatch
):
    loaded: list[int] = []
    monkeypatch.setattr(module, "load", lambda: loaded.append(1) or captioner)
    fresh = functools.cache(module._shipped_model.__wrapped__)
    monkeypatch.setattr(module, "_shipped_model", fresh)

    expected = captioner.caption(photos[0], beam_size=1)
    for _ in range(2):
        assert_same(package.caption(photos[0], beam_size=1), expected)
    assert loaded == [1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, photo: model.caption(photo, num_beams=4), "did you mean beam_size?"),
        (lambda model, photo: model.caption(photo, alternative=4), "did you mean alternatives?"),
        (lambda model, photo: model.caption(photo, device="cpu"), "pass it to captioner.load()"),
        (lambda model, photo: model.options(num_beams=4), "did you mean beam_size?"),
        (lambda model, photo: model.caption(photo, whatever=4), "; use one of alternatives, "),
        (lambda model, photo: model.predict(photo), "did you mean caption?"),
        (lambda model, photo: model.caption(photo).attention, "did you mean alphas?"),
        (lambda model, photo: model.caption(photo).as_dict(), "did you mean to_dict?"),
        (lambda model, photo: model.caption(photo).plot(), "did you mean show?"),
        (lambda model, photo: Captioner(), "use captioner.load()"),
        (lambda model, photo: package.SearchOptions(num_beams=4), "did you mean beam_size?"),
        (lambda model, photo: package.evaluate(num_beams=4), "did you mean beam_size?"),
        (lambda model, photo: package.overlay(photo), "without captions; use overlay(photo, capt"),
        (lambda model, photo: package.gallery(model.caption(photo)), "pass a list of captioner.E"),
        (
            lambda model, photo: model.explain(photo, "a", unknown=1),
            "unknown is an unknown option; use explain(photo, ",
        ),
        (lambda model, photo: model.explain(photo, "a", metod="x"), "did you mean method?"),
        (lambda model, photo: model(photo, 3), "caption() got too many positional arguments; use "),
        (lambda model, photo: package.load(gpu=True), 'pass device="cuda"'),
        (lambda model, photo: package.load(precison="fp32"), "did you mean precision?"),
        (lambda model, photo: package.load(num_beams=4), "to model.caption()"),
        (lambda model, photo: package.attend(photo), "did you mean overlay?"),
        (lambda model, photo: package.whatever, "it has Caption, "),
    ],
)
def test_a_wrong_guess_is_one_line_with_the_right_name(
    captioner: Captioner, photos: list[Path], call: Callable[..., Any], message: str
):
    with pytest.raises((AttributeError, ConfigError)) as caught:
        call(captioner, photos[0])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions of the package, and the classes with their methods."""
    for name in package.__all__[1:]:
        found = getattr(package, name)
        if isinstance(found, type) and issubclass(found, Exception):
            continue
        yield name, found
        for method in dir(found) if isinstance(found, type) else ():
            member = getattr(found, method)
            if inspect.isroutine(member) and method[0] != "_" and not hasattr(tuple, method):
                yield f"{name}.{method}", member


@pytest.mark.parametrize(("name", "call"), [*public_callables()])
def test_every_wrong_call_is_one_line(name: str, call: Callable[..., Any]):
    parameters = inspect.signature(call).parameters.values()  # as help() shows them
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        arguments: dict[str, Any] = {"no_such_option": 1}
        given: tuple[None, ...] = ()
    else:
        arguments, given = {}, (None,) * 50
    with pytest.raises(ConfigError) as caught:
        call(*given, **arguments)
    assert "\n" not in str(caught.value)


def test_decorated_functions_keep_their_errors_and_can_be_pickled():
    assert pickle.loads(pickle.dumps(package.overlay)) is package.overlay
    with pytest.raises(TypeError, match="expected string"):
        package.tokenize(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("owner", "table"),
    [
        (Captioner, Captioner._hints),
        (Caption, Caption._hints),
        (PhotoCaption, PhotoCaption._hints),
        (package, hints.FUNCTIONS),
        (SearchOptions, hints.SEARCH_OPTIONS),
        (SETTINGS, hints.SETTINGS),
    ],
)
def test_every_hint_names_something_that_exists(owner: object, table: dict[str, str]):
    known = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
    assert {meant for meant in table.values() if meant.isidentifier()} <= known
    assert not {name for name in table if name in known}


@pytest.mark.parametrize("display", ["", ":0"])
def test_show_needs_a_notebook_or_a_viewer(
    captioner: Captioner, photos: list[Path], monkeypatch: pytest.MonkeyPatch, display: str
):
    opened: list[Image.Image] = []
    monkeypatch.setattr(viewer.ImageShow, "show", lambda image, title: opened.append(image) or True)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", display)
    caption = captioner.caption(photos[0])

    if display:
        caption.show(theme="dark")
        assert len(opened) == 1
    else:
        with pytest.raises(ConfigError, match=r"neither a notebook nor an image viewer; save the"):
            caption.show()


def test_show_displays_the_figure_in_a_notebook(
    captioner: Captioner, photos: list[Path], monkeypatch: pytest.MonkeyPatch
):
    shown: list[object] = []
    notebook = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=None))
    display = types.SimpleNamespace(display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", display)

    captioner.caption(photos[0]).show()

    assert [type(one) for one in shown] == [Figure]


def test_a_caption_without_its_file_is_displayed_as_text(
    captioner: Captioner, photos: list[Path], tmp_path: Path
):
    photo = tmp_path / "gone.png"
    photo.write_bytes(photos[0].read_bytes())
    caption = captioner.caption(photo)
    photo.unlink()
    assert caption._repr_html_() is None
