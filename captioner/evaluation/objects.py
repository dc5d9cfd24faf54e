"""Finds the names of the 80 COCO categories in captions.

`WORDS` lists the phrases that name each category; ``dog(s)`` means "dog" and "dogs". A phrase is
included if COCO's annotators would most likely have labelled the object with that category.
Ambiguous words are excluded, which favours precision over recall:

* "orange" alone: a colour far more often than a fruit. "oranges" and "orange slice" count.
* "glass", "glasses": a window, spectacles or a drink; "wine glass" and "glass of wine" count.
* "baseball", "football", "basketball", "volleyball": the game more often than the ball.
* "plant", "bag", "screen", "desk", "van", "computer", "scooter", "chicken": COCO has two
  categories for them or none; "meter", "light": five metres, a lamp.
* "couple", "group", "crowd", "family", "team": of people or of giraffes.
* "male", "female", "passenger", "cook": they describe another noun, or are verbs.
* Pronouns: a model need not look at a person to generate "he".

"bike" is a bicycle unless "motor" or "dirt" precedes it. If a word is part of a longer phrase ("hot
dog", "bus stop", "baby zebra", "skis down"), the longer phrase wins: it names another category or,
if it is in `OTHERS`, none.

Source: the category names are COCO's (Lin et al. 2014, arXiv:1405.0312); the phrases were collected
for this package from captions, before any model was measured with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

WORDS: dict[str, str] = {
    "person": (
        "person(s), people, man, men, woman, women, boy(s), girl(s), child, children, kid(s), "
        "baby, babies, infant(s), toddler(s), adult(s), males, females, lady, ladies, guy(s), "
        "gentleman, gentlemen, someone, teen(s), teenager(s), baby boy(s), baby girl(s), "
        "mother(s), father(s), mom(s), dad(s), parent(s), son(s), daughter(s), brother(s), "
        "sister(s), husband(s), wife, wives, grandmother, grandfather, friend(s), bride(s), "
        "groom(s), player(s), ballplayer(s), ball player(s), baseball player(s), tennis player(s), "
        "soccer player(s), football player(s), basketball player(s), volleyball player(s), "
        "frisbee player(s), batter(s), pitcher(s), catcher(s), umpire(s), referee(s), athlete(s), "
        "skier(s), snowboarder(s), boarder(s), skateboarder(s), skateboard rider(s), "
        "skate boarder(s), skater(s), surfer(s), surf boarder(s), kite surfer(s), kite boarder(s), "
        "kite flyer(s), swimmer(s), runner(s), jogger(s), hiker(s), climber(s), golfer(s), "
        "dancer(s), rider(s), bike rider(s), bicycle rider(s), motorcycle rider(s), "
        "horse rider(s), horseback rider(s), jet skier(s), biker(s), motor biker(s), bicyclist(s), "
        "cyclist(s), motorcyclist(s), bike racer(s), bicycle racer(s), motorcycle racer(s), "
        "jockey(s), driver(s), bus driver(s), truck driver(s), car driver(s), taxi driver(s), "
        "train conductor(s), passengers, bus passengers, train passengers, pedestrian(s), "
        "spectator(s), onlooker(s), tourist(s), student(s), teacher(s), worker(s), chef(s), "
        "waiter(s), waitress(es), vendor(s), hot dog vendor(s), farmer(s), fisherman, fishermen, "
        "businessman, businessmen, cowboy(s), cow boy(s), cowgirl(s), sheep herder(s), "
        "dog walker(s), policeman, policemen, police officer(s), officer(s), fireman, firemen, "
        "firefighter(s), fire fighter(s), soldier(s), doctor(s), nurse(s), bull fighter(s)"
    ),
    "bicycle": "bicycle(s), bike(s), pedal bike(s), tricycle(s)",
    "car": (
        "car(s), suv(s), sedan(s), taxi(s), taxi cab(s), automobile(s), minivan(s), jeep(s), "
        "limousine(s), limo(s), race car(s), police car(s)"
    ),
    "motorcycle": (
        "motorcycle(s), motor cycle(s), motorbike(s), motor bike(s), dirt bike(s), dirtbike(s), "
        "moped(s), vespa(s), motor scooter(s)"
    ),
    "airplane": (
        "airplane(s), air plane(s), aeroplane(s), plane(s), aircraft, jet(s), airliner(s), "
        "jetliner(s), jet liner(s), jet airplane(s), jet plane(s), jumbo jet(s), fighter jet(s), "
        "biplane(s), seaplane(s)"
    ),
    "bus": (
        "bus(es), busses, double decker(s), double decker bus(es), minibus(es), trolley bus(es)"
    ),
    "train": (
        "train(s), locomotive(s), train car(s), train engine(s), steam engine(s), railroad car(s), "
        "rail car(s), box car(s), subway car(s)"
    ),
    "truck": (
        "truck(s), pickup(s), pick up truck(s), pickup truck(s), fire truck(s), firetruck(s), "
        "fire engine(s), lorry, lorries, big rig(s), food truck(s), tow truck(s)"
    ),
    "boat": (
        "boat(s), ship(s), sailboat(s), sail boat(s), speedboat(s), motorboat(s), rowboat(s), "
        "row boat(s), houseboat(s), tugboat(s), canoe(s), kayak(s), yacht(s), ferry, ferries, "
        "ferry boat(s), barge(s), dinghy, dinghies, catamaran(s), banana boat(s)"
    ),
    "traffic light": (
        "traffic light(s), traffic signal(s), stop light(s), stoplight(s), street signal(s)"
    ),
    "fire hydrant": "fire hydrant(s), hydrant(s), fireplug(s), fire plug(s)",
    "stop sign": "stop sign(s)",
    "parking meter": "parking meter(s)",
    "bench": "bench(es)",
    "bird": (
        "bird(s), seagull(s), sea gull(s), gull(s), duck(s), duckling(s), goose, geese, swan(s), "
        "parrot(s), parakeet(s), pigeon(s), dove(s), owl(s), eagle(s), hawk(s), falcon(s), "
        "rooster(s), hen(s), peacock(s), flamingo(s), pelican(s), penguin(s), ostrich(es), "
        "heron(s), egret(s), stork(s), sparrow(s), hummingbird(s), cockatoo(s)"
    ),
    "cat": "cat(s), kitten(s), kitty, kitties",
    "dog": (
        "dog(s), puppy, puppies, puppy dog(s), pup(s), doggy, doggie(s), poodle(s), pug(s), "
        "bulldog(s), bull dog(s), pit bull(s), sheepdog(s), sheep dog(s), dachshund(s), "
        "greyhound(s), retriever(s), golden retriever(s), labrador(s), labrador retriever(s), "
        "terrier(s), collie(s), border collie(s), german shepherd(s), dalmatian(s), husky, "
        "huskies, chihuahua(s), beagle(s), spaniel(s), rottweiler(s)"
    ),
    "horse": "horse(s), pony, ponies, foal(s), colt(s), stallion(s), mare(s), race horse(s)",
    "sheep": "sheep, lamb(s), ewe(s)",
    "cow": (
        "cow(s), cattle, bull(s), calf, calves, ox, oxen, heifer(s), longhorn(s), "
        "water buffalo(s), water buffaloes"
    ),
    "elephant": "elephant(s), elephant calf, elephant calves",
    "bear": "bear(s), polar bear(s), grizzly bear(s), grizzly, bear cub(s)",
    "zebra": "zebra(s)",
    "giraffe": "giraffe(s), giraffe calf, giraffe calves",
    "backpack": "backpack(s), back pack(s), knapsack(s), rucksack(s), bookbag(s), book bag(s)",
    "umbrella": "umbrella(s), parasol(s)",
    "handbag": "handbag(s), hand bag(s), purse(s), pocketbook(s), shoulder bag(s), tote bag(s)",
    "tie": "tie(s), necktie(s), neck tie(s), bow tie(s), bowtie(s)",
    "suitcase": "suitcase(s), suit case(s), luggage, luggage bag(s), baggage",
    "frisbee": "frisbee(s), flying disc(s), flying disk(s)",
    "skis": "skis",
    "snowboard": "snowboard(s), snow board(s)",
    "sports ball": (
        "sports ball(s), ball(s), tennis ball(s), soccer ball(s), basket ball(s), foot ball(s), "
        "volley ball(s), rugby ball(s), beach ball(s), bowling ball(s), golf ball(s), "
        "soccerball(s)"
    ),
    "kite": "kite(s)",
    "baseball bat": "baseball bat(s), bat(s)",
    "baseball glove": (
        "baseball glove(s), baseball mitt(s), mitt(s), catcher 's mitt, catcher 's glove, "
        "catchers mitt(s)"
    ),
    "skateboard": "skateboard(s), skate board(s), longboard(s)",
    "surfboard": (
        "surfboard(s), surf board(s), boogie board(s), boogieboard(s), body board(s), "
        "bodyboard(s), paddle board(s), paddleboard(s)"
    ),
    "tennis racket": "tennis racket(s), tennis racquet(s), racket(s), racquet(s)",
    "bottle": "bottle(s), baby bottle(s)",
    "wine glass": (
        "wine glass(es), wineglass(es), glass of wine, glasses of wine, glass of red wine, "
        "glass of white wine, champagne glass(es), wine goblet(s)"
    ),
    "cup": "cup(s), mug(s), teacup(s), tea cup(s), coffee cup(s), coffee mug(s)",
    "fork": "fork(s)",
    "knife": "knife, knives",
    "spoon": "spoon(s)",
    "bowl": "bowl(s)",
    "banana": "banana(s)",
    "apple": "apple(s)",
    "sandwich": "sandwich(es), hamburger(s), burger(s), cheeseburger(s), panini(s)",
    "orange": (
        "oranges, orange slice(s), orange wedge(s), slice of orange, slices of orange, "
        "peeled orange(s), sliced orange(s), mandarin orange(s)"
    ),
    "broccoli": "broccoli",
    "carrot": "carrot(s), baby carrot(s)",
    "hot dog": "hot dog(s), hotdog(s), chili dog(s)",
    "pizza": "pizza(s)",
    "donut": "donut(s), doughnut(s)",
    "cake": "cake(s), cupcake(s), cup cake(s), cheesecake(s), carrot cake(s), banana cake(s)",
    "chair": "chair(s), armchair(s), arm chair(s), recliner(s)",
    "couch": "couch(es), sofa(s), loveseat(s), love seat(s), futon(s), sofa bed(s)",
    "potted plant": (
        "potted plant(s), pot plant(s), house plant(s), houseplant(s), potted flower(s), "
        "potted tree(s), flower pot(s), flowerpot(s), plant in a pot, plants in pots"
    ),
    "bed": "bed(s), bunk bed(s)",
    "dining table": "dining table(s), table(s), dinner table(s), kitchen table(s)",
    "toilet": "toilet(s), toilet bowl(s), toilet seat(s), commode(s)",
    "tv": (
        "tv(s), t.v., tv set(s), tv screen(s), television(s), television set(s), "
        "television screen(s), flat screen(s), flat screen tv(s), flat screen television(s), "
        "monitor(s), computer monitor(s), computer screen(s)"
    ),
    "laptop": (
        "laptop(s), laptop computer(s), laptop screen(s), laptop keyboard(s), lap top(s), "
        "apple laptop(s), macbook(s), apple macbook(s)"
    ),
    "mouse": "mouse, mice, computer mouse, computer mice",
    "remote": (
        "remote(s), remote control(s), remote controller(s), tv remote(s), wii remote(s), "
        "wiimote(s), wii controller(s), nintendo wii controller(s), game controller(s), "
        "video game controller(s), television remote(s)"
    ),
    "keyboard": "keyboard(s), computer keyboard(s)",
    "cell phone": (
        "cell phone(s), cellphone(s), phone(s), mobile phone(s), smartphone(s), smart phone(s), "
        "iphone(s), flip phone(s)"
    ),
    "microwave": "microwave(s), microwave oven(s)",
    "oven": "oven(s), stove(s), stovetop(s), stove top(s), stove top oven(s)",
    "toaster": "toaster(s)",
    "sink": "sink(s)",
    "refrigerator": "refrigerator(s), fridge(s), refrigerator freezer(s)",
    "book": "book(s), textbook(s), text book(s)",
    "clock": "clock(s), alarm clock(s)",
    "vase": "vase(s)",
    "scissors": "scissors, pair of scissors, shears",
    "teddy bear": (
        "teddy bear(s), teddy, teddies, teddybear(s), stuffed bear(s), toy bear(s), plush bear(s), "
        "stuffed teddy bear(s), toy teddy bear(s)"
    ),
    "hair drier": (
        "hair drier(s), hair dryer(s), hairdrier(s), hairdryer(s), blow drier(s), blow dryer(s)"
    ),
    "toothbrush": "toothbrush(es), tooth brush(es)",
}
"""Comma-separated phrases that name each category."""

OTHERS = (
    # not people
    "snow man, man made, men 's room, women 's room, pitcher of, cake batter, cd player(s), "
    "dvd player(s), record player(s), music player(s), baby stroller(s), baby carriage(s), "
    "baby crib(s), baby food, dream catcher(s), cowboy hat(s), cow boy hat(s), cowboy boot(s), "
    # places and vehicle accessories
    "bike rack(s), bike lane(s), bike path(s), bike trail(s), bike shop(s), bicycle rack(s), "
    "bike helmet(s), bicycle helmet(s), motorcycle helmet(s), exercise bike(s), car park(s), "
    "car seat(s), cable car(s), street car(s), bumper car(s), jet ski(s), bus stop(s), "
    "bus station(s), bus terminal(s), bus depot(s), bus lane(s), train station(s), train track(s), "
    "train platform(s), train yard(s), train depot(s), train terminal(s), train stop(s), "
    "train set(s), train line(s), train rail(s), truck stop(s), truck bed(s), hand truck(s), "
    "boat house(s), boat dock(s), boat ramp(s), gravy boat(s), space ship(s), "
    # animal products, pictures and housing
    "bird feeder(s), bird cage(s), bird bath(s), rubber duck(s), cat tree(s), "
    "kitty litter, horse trailer(s), horse stable(s), rocking horse(s), carousel horse(s), "
    "saw horse(s), lamb chop(s), rack of lamb, zebra crossing(s), zebra print(s), zebra stripes, "
    "mickey mouse, minnie mouse, corn dog(s), bird 's eye, birds eye, dog sled(s), dog sledding, "
    "ducks his, ducks her, ducks under, ducks down, couch potato(es), "
    # accessories and sports
    "umbrella stand(s), luggage cart(s), baggage cart(s), luggage rack(s), baggage claim, "
    "luggage carousel(s), tie dye, tie dyed, tie up, to tie, tie his, tie her, ties up, ties a, "
    "ties his, ties her, kite string(s), skateboard park(s), skateboard ramp(s), "
    "skate board park(s), ball game(s), ball park(s), ball field(s), ball pit(s), ball cap(s), "
    "ball gown(s), playing ball, play ball, plays ball, snow ball(s), disco ball(s), meat ball(s), "
    "ball of yarn, yarn ball(s), pool ball(s), at bat, to bat, cricket bat(s), oven mitt(s), "
    "frisbee golf, kite surfing, kite boarding, bats the, bats a, bats at, "
    "playing the keyboard(s), playing keyboard(s), playing a keyboard, plays the keyboard, "
    # kitchen and table
    "bottle opener(s), cup holder(s), world cup, pitch fork(s), fork lift(s), fork in the road, "
    "fish bowl(s), super bowl, banana split(s), banana bread, banana tree(s), banana leaf, "
    "banana leaves, apple pie(s), apple juice, apple tree(s), apple computer(s), pine apple(s), "
    "apple sauce, ice cream sandwich(es), pizza box(es), pizza cutter(s), "
    "pizza pan(s), pizza parlor(s), pizza place(s), pizza shop(s), pizza crust(s), pizza sauce, "
    "pizza dough, hot dog stand(s), hot dog cart(s), hot dog bun(s), donut shop(s), "
    "doughnut shop(s), donut hole(s), pan cake(s), crab cake(s), rice cake(s), cake pan(s), "
    "cake stand(s), toaster oven(s), "
    # furniture and rooms
    "bench press, work bench(es), chair lift(s), wheel chair(s), bed room(s), bed of, "
    "flower bed(s), bed spread(s), bed sheet(s), pool table(s), ping pong table(s), "
    "foosball table(s), table tennis, table cloth(s), table lamp(s), end table(s), side table(s), "
    "night table(s), bedside table(s), coffee table(s), toilet paper, toilet paper roll(s), "
    "toilet brush(es), toilet tissue, toilet room(s), toilet stall(s), "
    # screens, phones, books
    "tv stand(s), tv show(s), television show(s), tv tray(s), laptop bag(s), laptop case(s), "
    "mouse pad(s), mouse ears, remote area(s), remote location(s), remote road(s), "
    "remote field(s), remote controlled, remote control car(s), remote control plane(s), "
    "remote control airplane(s), phone booth(s), phone call(s), phone pole(s), pay phone(s), "
    "head phones, ear phones, refrigerator magnet(s), fridge magnet(s), "
    "refrigerator door magnet(s), book shelf, book shelves, book case(s), book store(s), "
    "note book(s), check book(s), clock tower(s), toothbrush holder(s)"
)
"""Phrases that contain one of the words above but name none of the 80 categories."""

_ANIMALS = ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe")
_VEHICLES = ("car", "motorcycle", "airplane", "bus", "train", "truck", "boat")
# "a baby elephant" is not a person; "a stuffed dog", "a toy car" and "a dog house" are in no
# category.
_YOUNG = ("baby", "adult", "mother", "mama")
_MADE = ("stuffed", "toy", "plush", "model")
_BELONGINGS = (
    "toy", "toys", "statue", "statues", "sculpture", "costume", "food", "house", "collar", "leash",
    "bed",
)  # fmt: skip
# "a man skis down a hill": verbs, recognized by the preposition that follows.
_VERBS = ("skis", "snowboards", "skateboards", "kayaks", "canoes")
_WAYS = ("down", "up", "over", "through", "past", "across", "along", "off", "into", "towards")


class Name(NamedTuple):
    """A category named by words[start:stop] of a caption."""

    category: str
    start: int
    stop: int


def find_names(words: Sequence[str]) -> list[Name]:
    """Find the COCO categories that a caption names.

    Names do not overlap; from left to right, the longest phrase wins. Hyphens may replace the
    spaces of a phrase ("hot-dog").

    Args:
        words: Lower-case Penn Treebank tokens (`captioner.text.tokenizer`), e.g. ``Caption.words``.

    Returns:
        The names in word order.
    """
    names, start = [], 0
    while start < len(words):
        stop = _end(words, start)
        category = _PHRASES.get(tuple(words[start:stop]))
        if category is not None:
            names.append(Name(category, start, stop))
        start = stop
    return names


def _end(words: Sequence[str], start: int) -> int:
    """End of the longest phrase that starts here, or of the single word."""
    for stop in range(min(start + _LONGEST, len(words)), start + 1, -1):
        if tuple(words[start:stop]) in _PHRASES:
            return stop
    return start + 1


def _phrases(text: str) -> Iterator[tuple[str, ...]]:
    """The phrases of a comma-separated list; "dog(s)" gives "dog" and "dogs"."""
    for entry in text.split(","):
        stem, _, ending = entry.strip().rstrip(")").partition("(")
        yield tuple(stem.split())
        if ending:
            yield tuple(f"{stem}{ending}".split())


def _table() -> dict[tuple[str, ...], str | None]:
    """The category of each phrase, None for those that only look like a name."""
    table: dict[tuple[str, ...], str | None] = dict.fromkeys(product(_VERBS, _WAYS))
    for category in _ANIMALS + _VEHICLES:
        for phrase in _phrases(WORDS[category]):
            table.update({(made, *phrase): None for made in _MADE})
    for animal in _ANIMALS:
        for phrase in _phrases(WORDS[animal]):
            table.update({(young, *phrase): animal for young in _YOUNG})
            table.update({(*phrase, thing): None for thing in _BELONGINGS})
    # Explicit phrases override the generated ones: "stuffed bear" is a teddy bear.
    table.update(dict.fromkeys(_phrases(OTHERS)))
    for category, text in WORDS.items():
        table.update(dict.fromkeys(_phrases(text), category))
    return {("-".join(phrase),): category for phrase, category in table.items()} | table


_PHRASES = _table()
_LONGEST = max(len(phrase) for phrase in _PHRASES)
