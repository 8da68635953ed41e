"""A model's image processor in its PIL form, which needs no torchvision: loaded, identified by a hash, and run.

Two forms of one processor resize differently, so the form belongs to the identity.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...tapes.errors import MissingExtra, UsageError
from ...tapes.places import Place

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers.image_processing_utils import BaseImageProcessor


class BadProcessor(UsageError):
    """A folder's image processor is missing, or is not one that its model's family is proven with."""


def load_processor(folder: Path, kinds: tuple[str, ...]) -> BaseImageProcessor:
    """The image processor that `folder` names, in its PIL form, which must be of one of the classes `kinds`. Raises
    BadProcessor."""
    try:
        import PIL  # noqa: F401
        from transformers import AutoImageProcessor
    except ImportError as error:
        raise MissingExtra(error.name or "pillow", "train", f"the image processor in {folder}") from None
    try:
        found: Any = AutoImageProcessor.from_pretrained(
            str(folder), backend="pil", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types for a broken folder
        raise BadProcessor(
            f"the image processor in {folder} can't be loaded ({type(error).__name__}: {error!s:.300}): the folder "
            "of a vision model needs the file preprocessor_config.json; copy it from the model's original folder"
        ) from error
    if type(found).__name__ not in kinds:
        raise BadProcessor(
            f"the image processor in {folder} is a {type(found).__name__}, and this family of models is proven with "
            f"{' or '.join(kinds)}: set image_processor_type in preprocessor_config.json to the model's own"
        )
    if not (found.do_resize and found.do_convert_rgb):
        raise BadProcessor(
            f"the image processor in {folder} has do_resize={found.do_resize} and "
            f"do_convert_rgb={found.do_convert_rgb}: both must be true, since pictures have any size"
        )
    return found


def processor_hash(processor: BaseImageProcessor) -> str:
    """SHA-256 (hex) of the processor's class, form and settings, and the versions of transformers and Pillow."""
    import PIL
    import transformers

    about = {
        "class": type(processor).__name__,
        "backend": "pil",
        "settings": json.loads(processor.to_json_string()),
        "transformers": transformers.__version__,
        "pillow": PIL.__version__,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def processed(processor: BaseImageProcessor, place: Place, files: list[bytes], **settings: bool) -> dict[str, Tensor]:
    """What the processor makes of a picture's bytes: tensors by name. Raises ValueError with the file's name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a processor warns where it guesses what the axes of an array mean
            run: Any = processor
            return dict(run(images=[_decoded(data) for data in files], return_tensors="pt", **settings))
    except Exception as error:
        raise ValueError(f"the picture {place.media[0]} can't be processed: {type(error).__name__}: {error}") from error


def _decoded(data: bytes) -> Image:
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=["PNG"]).convert("RGB")
