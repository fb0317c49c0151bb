"""Sentences that no question asks about: the bulk between the facts of a document.

The text is the project's own.  A few sentences have slots, so that the filler of a held-out
document is not a fixed list that training has seen.
"""

import random

from thermocline.documents.words import MACHINES, PLACES, WORDS

SENTENCES = tuple(
    line.strip()
    for line in """
    The weather was calm for most of the week.
    Nothing else was reported that day.
    The meeting ended a little before noon.
    All staff were informed by letter.
    This section was reviewed last month.
    Please keep this document in a dry place.
    The report was printed twice and filed once.
    Further notes follow below.
    No other changes were made to the plan.
    A short break was taken after the second hour.
    The visitors arrived by train and left on foot.
    Someone had left the lights on over the weekend.
    The minutes were read aloud and approved.
    Two chairs were moved to make more space.
    Heavy rain delayed the delivery until evening.
    The committee thanked everyone for their patience.
    Most of the questions were answered on the spot.
    A copy was sent to each department.
    The old signs will be replaced in spring.
    Nobody objected to the proposal.
    The next inspection is planned for the autumn.
    Tea and biscuits were served in the hall.
    The road was closed for repairs on Tuesday.
    An early draft of this page contained errors.
    Readers are asked to report mistakes.
    The windows were cleaned at the end of the month.
    Several boxes were still waiting to be opened.
    The list was sorted by hand and then checked again.
    A new bicycle rack was put up beside the gate.
    It was agreed to meet again in two weeks.
    The work took longer than anyone had expected.
    Three people volunteered to help with the move.
    The paint had not dried by the time the guests came.
    Everyone agreed that the room was too warm.
    The lift was out of order for most of the morning.
    A small crowd gathered to watch.
    The photographs turned out better than expected.
    Some of the labels had come loose.
    The original copy is kept in a locked drawer.
    Lunch was served in the open air.
    The new rules take effect after the holidays.
    It is not clear who left the note.
    The phone rang several times without an answer.
    A replacement part was ordered the same day.
    The tour lasted about an hour.
    Children were allowed to come along.
    The music could be heard from across the street.
    After some discussion the point was dropped.
    The figures were checked by a second person.
    Not all of the equipment was returned.
    The garden looked its best in early summer.
    A second page was added later.
    Many of the plants had to be watered by hand.
    The heating was turned down to save money.
    There was no time for further questions.
    The key had been put back on the wrong hook.
    A thin layer of dust covered the shelves.
    The speaker apologised for the delay.
    Visitors should use the side entrance.
    The clock in the corridor runs slightly fast.
    Old newspapers were used to wrap the cups.
    The first attempt did not go well.
    Every second lamp was switched off at night.
    The schedule was changed at short notice.
    Rumours about a sale turned out to be false.
    A map was pinned to the wall by the door.
    The survey was repeated a year later.
    Few people remembered the earlier version.
    The bus stops just outside the gate.
    The letter was signed but never posted.
    All doors must stay closed during the test.
    The storm damaged part of the fence.
    A friendly dog sat by the entrance all day.
    The summary leaves out some details.
    The team worked through the night to finish.
    The stairs were swept every morning.
    It took three tries to start the machine.
    The result surprised even the experts.
    The wall was painted in a lighter shade.
    There were no complaints from the neighbours.
    The handwriting was difficult to read.
    The cupboard under the stairs was full.
    The water was shut off for an hour.
    Lost property can be collected at the desk.
    The snow had melted by the afternoon.
    Plans for a larger hall were put aside.
    The audience stayed until the very end.
    A spare cable was found in the cellar.
    The road back was quieter than the road there.
    The price of bread had gone up again.
    The sound of the bells carried for miles.
    Half of the seats were already taken.
    The instructions were clear and brief.
    A wooden box held the rest of the papers.
    The last train leaves shortly before midnight.
    The floor was still wet in places.
    Each group chose its own speaker.
    The trees along the path were trimmed.
    Somebody suggested opening a window.
    The contract was renewed without changes.
    The ink had faded over the years.
    A fresh coat of paint made a great difference.
    The fire drill went smoothly.
    The roof no longer leaks.
    Volunteers handed out warm drinks.
    The file was damaged and had to be restored.
    The light in this corner is rather poor.
    Both sides promised to keep in touch.
    The guide spoke slowly and clearly.
    No one could say how old the building was.
    The path leads past a row of cottages.
    A few pages were missing from the folder.
    The alarm went off by mistake.
    The shop opens later on Sundays.
    The day began with a short walk.
    Repairs were finished ahead of time.
    The sign above the door had lost a letter.
    The crew was thanked for its careful work.
    Dinner was late, but nobody seemed to mind.
    The news reached the village by evening.
    The bridge was busy in both directions.
    This paragraph may be skipped.
    The tools were cleaned and put away.
    A bench was placed under the tallest tree.
    The exhibition was free for students.
    The count was repeated to be safe.
    The river was higher than usual.
    An umbrella was left behind in the lobby.
    The carpets were taken out and beaten.
    Fog made it hard to see the far bank.
    The long corridor had been swept twice.
    They waited for a reply that never came.
    The coffee was strong and the talk was long.
    The journey home took most of the day.
    A small repair kit is kept near the exit.
    The plan was simple, and it worked.
    """.strip().splitlines()
)

TEMPLATES = (
    "The {machine} was checked and found to be in good order.",
    "A {word} was drawn on the cover of the report.",
    "Someone asked about the {machine}, but nobody knew.",
    "The talk about {word} and {word2} was well attended.",
    "A visit to the {place} was planned for the spring.",
    "There was a smell of {word} in the corridor.",
    "The {place} was closed for the holidays.",
    "The old {machine} was finally sold.",
    "A box of {word} was left at the {place}.",
    "The story of the {word} and the {word2} was told again.",
    "The {place} and the {place2} share a car park.",
    "Nobody had seen the {machine} since the move.",
)


def filler_sentence(rng: random.Random, sentences: tuple[str, ...] = SENTENCES) -> str:
    """Draw one sentence: two thirds from ``sentences``, one third from the templates."""
    if rng.random() < 2 / 3:
        return rng.choice(sentences)
    word, word2 = rng.sample(WORDS, 2)
    place, place2 = rng.sample(PLACES, 2)
    return rng.choice(TEMPLATES).format(
        machine=rng.choice(MACHINES), word=word, word2=word2, place=place, place2=place2
    )
