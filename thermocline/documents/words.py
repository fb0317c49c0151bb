"""The word lists that documents are made of.

Every list is written for this project.  The order matters: a seed selects words by index.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ONSETS = _words("b d f g h j k l m n p r s t v z br dr kr pl sk st")
VOWELS = _words("a e i o u")
CODAS = ("", "", "n", "r", "l", "s")

FIRST_NAMES = _words(
    """
    Ada Boris Clara David Elena Felix Greta Henry Irene Jonas Karen Louis Maria Nils Olga Peter
    Rosa Simon Tina Victor Wanda Yusuf Zoe Alan Beth Carl Diana Erik Fiona Gina
    """
)
PLACES = _words(
    """
    office warehouse station library museum hotel factory clinic school harbour laboratory
    theatre garden bridge market archive bakery depot
    """
)
MACHINES = _words(
    """
    engine pump printer server router sensor turbine camera drone truck boat reactor lamp clock
    robot crane boiler lift
    """
)

NUMBER_ATTRIBUTES = (
    "access code", "phone extension", "budget", "capacity", "opening year", "room number",
    "invoice number", "serial number", "locker code", "postal code", "weight", "height",
    "ticket price", "badge number", "batch number", "floor area", "daily limit", "account number",
    "queue length", "parking space",
)  # fmt: skip
WORD_ATTRIBUTES = (
    "manager", "supplier", "owner", "director", "contact person", "courier", "password", "colour",
    "favourite dish", "code name", "material", "mascot", "sponsor", "architect", "engineer",
    "home town", "backup site", "category", "main product", "emblem",
)  # fmt: skip

WORDS = _words(
    """
    acorn amber anchor apple apron arrow autumn badger bamboo banana barley basket beacon beaver
    bell berry birch biscuit blanket blossom blue bottle bread breeze brick bridle bronze brown
    bucket butter button cabbage cabin cactus candle canvas canyon carbon carpet carrot castle
    cedar chalk cherry chess chestnut cider cinnamon circle clay cliff clover coal cobalt
    coconut coffee comet copper coral cork corn cotton crab cream cricket crimson crow crystal
    cup curtain daisy dancer desert diamond dolphin dove dragon drum duck dune eagle earth echo
    eel elm ember emerald engine fable falcon feather fern ferry fiddle fig finch fire flame
    flax flint flower flute fog forest fountain fox frost fruit galaxy garlic garnet ginger
    glacier glass glove goat gold goose granite grape grass gravel green grey grove guitar
    hammer harbor harp hawk hazel heather hedge helmet heron hill honey horizon horn horse ice
    indigo ink iris iron island ivory ivy jacket jade jasmine jewel juniper kettle key kite
    kitten ladder lagoon lake lantern lark laurel lava lavender leaf leather lemon lichen lilac
    lily lime linen lion lizard lobster lotus lynx magnet magpie maple marble meadow melon
    merlin mint mirror mist moon moose mosaic moss moth mountain mushroom mustard needle nest
    nickel night north nutmeg oak oasis oat ocean olive onion onyx opal orange orbit orchard
    orchid otter owl oyster paddle palm panda panther paper parrot pasta peach peacock pear
    pearl pebble pelican pencil penguin pepper petal piano pigeon pine pink planet plum pocket
    polar pond poplar poppy potato prairie puma purple quail quarry quartz quill quilt rabbit
    radish rain raven red reed ribbon rice ridge river robin rocket rope rose ruby rust saddle
    saffron sage salmon salt sand sapphire satin scarlet seal shadow shell shore silk silver sky
    slate smoke snow socket soup spade sparrow spice spider spinach spoon spring spruce squid
    stone storm straw summer sun swallow swan table tango teapot temple thistle thorn thunder
    tiger timber tin toast tomato topaz torch tower trail trout tulip tundra turnip turtle
    valley vanilla velvet violet viper volcano walnut water wave wax wheat whistle white willow
    wind window winter wolf wood wool wren yarn yellow zebra zinc
    """
)
