"""Short texts about a person, to be answered by a JSON object of what they say."""

# ruff: noqa: SIM905  lists of words are read more easily without quotes
from __future__ import annotations

import json
import random
from typing import Any, Literal

from grpo_rl.config.schema.kinds import AnySeed, Count
from grpo_rl.data.tasks.made_rows import LazyRows, Row, row_of

Split = Literal["train", "val"]
Level = Literal["easy", "hard"]

# After a space most of these names are one token of SmolLM2's, after a quotation mark several: a model that
# copies one has to spell it, which it learns from many.
NAMES: dict[Split, tuple[str, ...]] = {
    "train": tuple(
        "Anna Ben Carla David Elena Felix Greta Hugo Ines Jonas Karin Leo Mira Nils Olga Paul Rosa Simon "
        "Tina Victor Wanda Yusuf Amir Bella Cedric Dina Emil Fatima Georg Hanna Ivan Julia Kofi Lina "
        "Marco Nora Omar Petra Ravi Sofia Francis Carol Abraham Luther Victoria Albert Philip Harry "
        "Patrick Benjamin Walter Douglas Margaret Frederick Solomon Marshall Nelson Howard Christopher "
        "Eric Isaac Susan Steve Anthony Karl Alfred Alan Morgan Juan Oliver Norman Lucy Nicholas Gordon "
        "Florence Catherine Jonathan Sally Brian Barbara Emma Bruce Ruth Roger Gregory Bernard Graham "
        "Joshua Helen Mitchell Martha Stanley Kelly Steven Grace Charlotte Augustine Kevin Lisa Ryan "
        "Laura Herbert Jake Nathan Rachel Calvin Aaron Rick Homer Dave Nancy Ralph Charlie Vincent Harold "
        "Harvey Gary Karen Todd Arnold Andre Julius Timothy Joan Friedrich Henri Basil Tony Hunter Linda "
        "Gilbert Jess Billy Edmund Robin Ronald Hugh Theodore Gabriel Craig Leonardo Julian Jennifer "
        "Malcolm Jason Wayne Ruby Ellen Ernest Maxim Constantine Johannes Clara Kate Saul Troy Luis Keith "
        "Esther Clement Jeremiah Juliet Owen Orion Pablo Bruno Claire Jill Erik Floyd Denis Abigail "
        "Hassan Elliott Adrian Olivia Raphael Irving Hermann Ezra Whitney Fletcher Seth Cyrus Antony "
        "Penny Sidney Brett Miranda Fernando Nathaniel Ashley Jonah Horace Amanda Sebastian Nicole "
        "Heather Monica Amos Rudolf Stephanie Abbott Ella Brent Juno Holly Kathleen Katie Hillary Nicolas "
        "Nina Sandra Molly Virgil Casey Stefan Abdullah Lorenzo Iris Oswald Diane Roland Shirley Preston "
        "Allison Marianne Cecil Alexandra Melissa Lyndon Vera Drew Alexa Francesco Ibrahim Dalton Sophie "
        "Alison Naomi Titus Raja Pascal Judy Dudley Wolfgang Fritz Christina Chuck Agnes Bobby Jules "
        "Lazarus Dwight Elis Ethan Jackie Elias Quinn Mikhail Randall Josef Musa Miriam Luna Willis Eliza "
        "Lorraine Wendy Josiah Clayton Clifford Clarence Jorge Erin Polly Gertrude Cornelius Laurence "
        "Samantha Lauren Carmel Adele Boris Chiara Dmitri Edith Farid Gisela Henrik Isabel Jakob Kemal "
        "Louise Tomas Nadia Oskar Priya Agata Alvaro Anouk Astrid Beatriz Carmen Daniela Diego Dominik "
        "Eva Fabian Frida Gustav Hannes Helga Ingrid Irene Ismail Janek Joao Katya Kenji Lars Leila "
        "Magnus Marek Marta Matteo Miguel Natalia Niklas Noah Pedro Pia Rania Renata Samir Selma Stella "
        "Sven Tamara Teresa Theo Ulrike Valeria Viktor Yara Yuki".split()
    ),
    "val": tuple(
        "Aisha Andrzej Bjorn Camille Dusan Elif Fiona Gunnar Haruki Ilse Jovana Kamil Ludmila Maeve "
        "Nikhil Odile Paolo Quentin Rafael Saskia Thiago Ursula Vasily Wim Ximena Yannick Zofia Anselm "
        "Bronwyn Corinna Dario Estelle Fergus Giulia Hector Imogen Joris Kirsten Lennart Mathilde Nuria "
        "Orla Pavel Rosalind Sanjay Tariq Uma Vivian Wesley Zelda Alina Bertil Celeste Desmond Eleanor "
        "Franz Geraldine Hilda Igor Jasper Klaus Lydia Monika Nigel".split()
    ),
}
CITIES: dict[Split, tuple[str, ...]] = {
    "train": tuple(
        "Berlin Paris Madrid Lisbon Oslo Vienna Rome Dublin Prague Athens Helsinki Warsaw Zurich Geneva "
        "Munich Lyon Porto Milan Turin Bergen Cairo Lagos Nairobi Delhi Tokyo Seoul Lima Boston Chicago "
        "Denver Jerusalem Philadelphia Antioch Toronto Moscow Berkeley Orleans Sydney Houston Baltimore "
        "Beijing Atlanta Detroit Cleveland Florence Venice Melbourne Montreal Edinburgh Vancouver "
        "Birmingham Manhattan Portland Richmond Amsterdam Miami Manchester Pittsburgh Brooklyn Phoenix "
        "Ottawa Dallas Bristol Copenhagen Brussels Glasgow Salvador Cincinnati Rochester Kyoto Shanghai "
        "Norfolk Dresden Nottingham Leipzig Nuremberg Calgary Bombay Toledo Winchester Omaha Monterey "
        "Dubai Bonn Calcutta Syracuse Winnipeg Hartford Louisville Lexington Canberra Brisbane "
        "Indianapolis Halifax Tucson Perth Medina Tehran Exeter Leicester Greenwich Nagasaki Budapest "
        "Havana Honolulu Edmonton Cardiff Worcester Gloucester Portsmouth Southampton Belfast Cologne "
        "Heidelberg Salisbury Tampa Dayton Raleigh Johannesburg Bologna Lyons Hyderabad Kabul Kiev Tunis "
        "Wuhan Hamburg Naples Valencia Krakow Cork Tampere Basel Marseille Mumbai Osaka Quito Seattle "
        "Gdansk Bilbao Seville Malaga Bordeaux Nantes Toulouse Bremen Stuttgart Hanover Graz Salzburg "
        "Ghent Antwerp Rotterdam Utrecht Aarhus Malmo Uppsala Riga Tallinn Vilnius Bucharest Belgrade "
        "Zagreb Sarajevo Izmir Ankara Casablanca Accra Dakar Kampala Jakarta Manila Hanoi Bangkok".split()
    ),
    "val": tuple(
        "Lille Verona Granada Poznan Galway Turku Bern Nice Chennai Kobe Bogota Austin Lublin Cadiz "
        "Rennes Mainz Linz Bruges Odense Kaunas Skopje Tirana Algiers Durban Lucerne Padua Braga Coimbra "
        "Leeds Dundee Trondheim Gothenburg Brno Debrecen Plovdiv Odessa Tbilisi Beirut Amman Karachi "
        "Lahore Dhaka Colombo Saigon Taipei Auckland Adelaide Memphis".split()
    ),
}
HOBBIES: dict[Split, tuple[str, ...]] = {
    "train": ("chess", "running", "painting", "cooking", "swimming", "reading", "hiking", "singing", "cycling", "gardening"),
    "val": ("sailing", "pottery", "climbing", "dancing", "baking", "skiing"),
}
PHRASINGS: dict[Split, tuple[str, ...]] = {
    "train": (
        "{name} is {age} years old and lives in {city}.",
        "My name is {name}, I am {age} and I live in {city}.",
        "{name}, {age}, from {city}, joined our team today.",
        "In {city} I met {name}, who has just turned {age}.",
        "Our new colleague {name} moved to {city} at the age of {age}.",
        "Hello, this is {name} from {city}. I am {age} years old.",
        "At {age}, {name} still works in a bakery in {city}.",
        "The {age}-year-old {name} drives a taxi in {city}.",
        "{city} is the home of {name}, aged {age}.",
        "I am writing to you from {city}. I am {age}, and my name is {name}.",
        "Please register {name} ({age}) for the course in {city}.",
        "{name} celebrated birthday number {age} with friends in {city}.",
        "Last week {name} rented a flat in {city}; the form says {age} years.",
        "A witness called {name}, {age} years of age, was heard in {city}.",
        "The parcel for {name} went to {city}; the customer is {age}.",
        "{name} turned {age} in {city} on Sunday.",
        "Although only {age}, {name} runs a small shop in {city}.",
        "Yesterday the police of {city} thanked {name}, {age}, for the help.",
        "The winner is {name}! The {age}-year-old comes from {city}.",
        "Patient: {name}. Age: {age}. Place of residence: {city}.",
        "When {name} was {age}, the family left for {city}.",
        "Write to {name} in {city}, please: a card for birthday number {age}.",
        "{name} was born {age} years ago, and in {city} at that.",
        "{name} of the {city} office will be {age} tomorrow.",
        "Reservation: {name}, one adult of {age}, hotel in {city}.",
        "The mayor of {city} shook hands with {name}, who is {age} now.",
        "Age {age}, home town {city}, first name {name}.",
        "A letter came from {name}, {age}, who studies in {city}.",
        "Doctor {name}, {age}, opened a practice in {city}.",
        "Captain {name} leads the fire brigade of {city} and is {age}.",
        "Aunt {name} in {city} is {age} by now.",
        "Professor {name} teaches in {city} and is {age} years old.",
        "The choir of {city} has a new voice: {name}, {age}.",
        "The chess club of {city} was beaten by {name}, a player of {age}.",
        "Everybody in {city} knows {name}, who is {age}.",
        "Somebody from {city} called, {name}, {age}.",
        "Driver {name}, {age}, was stopped near {city}.",
        "{city} has a new champion, {name}, who is {age}.",
        "From {city} comes the report of {name}, a reader of {age}.",
        "Student {name} ({age}) found a room in {city}.",
        "We spoke to {name} in {city}, a gardener of {age} years.",
        "Born {age} years ago, {name} has never left {city}.",
        "Dear all, please welcome {name}! {name} comes from {city} and is {age}.",
        "The prize went to {name} of {city}, who is only {age}.",
        "Ticket for {name}, age {age}, departing from {city}.",
        "Among the guests in {city} was {name}, {age} years old.",
        "Nobody in {city} sings like {name}, even at {age}.",
        "Name of the applicant: {name}; living in {city}; {age} years old.",
        "It was {name} who called from {city}, a teacher of {age}.",
        "{age} candles were on the cake when {name} had a party in {city}.",
        "The team from {city} won, and {name}, {age}, scored twice.",
        "My neighbour {name} is {age}. We both live in {city}.",
        "Since moving to {city}, {name} ({age}) takes the bus to work.",
        "Our guide through {city} will be {name}, {age} years young.",
        "I think {name} is about to turn {age}; the party is in {city}.",
        "Passenger {name}, aged {age}, left the train in {city}.",
        "At the market in {city} a certain {name}, {age}, sells cheese.",
        "Do you know {name}? A nurse in {city}, {age} years old.",
        "{city}: {name}, {age}, opens a new restaurant.",
        "This form was signed in {city} by {name} at the age of {age}.",
        "Say hello to {name}, our {age}-year-old trainee from {city}.",
        "Two tickets to {city} for {name}, who is {age}.",
        "The old house in {city} belongs to {name}, now {age} years old.",
        "{name} wrote a first novel in {city} and was {age} then.",
    ),
    "val": (
        "{name} has never lived anywhere but {city}, for {age} years now.",
        "A {age}-year-old called {name} won the lottery in {city}.",
        "Contact: {name}, {city}. Age: {age}.",
        "At the airport of {city}, {name}, {age}, waited for hours.",
        "The landlord in {city} says that {name} is {age}.",
        "{age} years old and never tired: {name} from {city}.",
        "In our {city} branch {name} ({age}) answers the phone.",
        "Witness {name}, {age}, of {city} saw nothing.",
        "They call {name} the best baker in {city}, at just {age}.",
        "Of all swimmers in {city}, {name} is the oldest at {age}.",
        "{name} will be {age} in May and is looking for a job in {city}.",
        "Have you heard of {name}, the pianist from {city}? Only {age}!",
        "Attendance: {name}, {age}, present. Place: {city}.",
        "It rained in {city} when {name} married at {age}.",
        "Guest {name} from {city} (age {age}) asks for a quiet room.",
        "The library in {city} fined {name}, {age}, for a late book.",
        "With {age} candles on the cake, {name} invited half of {city}.",
        "{city} is where {name}, {age}, learnt to sail.",
        "Hi! {name} here, {age}, writing from sunny {city}.",
        "The oldest runner in {city} was {name} at {age}.",
        "A room in {city} for {name}, please. Age of the guest: {age}.",
        "Nurse {name} works nights in {city} and is {age}.",
        "I, {name}, {age} years of age, resident of {city}, agree.",
        "Our trainer in {city} is {name}, who turned {age} last month.",
    ),
}
OPENINGS: dict[Split, tuple[str, ...]] = {
    "train": (
        "Hi, this is {name}.",
        "My name is {name}.",
        "Please add {name} to the list.",
        "I would like to introduce {name}.",
    ),
    "val": ("Greetings from {name}!", "The form was filled in by {name}."),
}
DETAILS: dict[str, dict[Split, tuple[str, ...]]] = {
    "age": {"train": ("The age is {age}.", "Age: {age} years.", "{age} years old."), "val": ("Turned {age} this spring.",)},
    "city": {
        "train": ("The address is in {city}.", "Home is {city}.", "Living in {city}."),
        "val": ("You can find us in {city}.",),
    },
    "hobbies": {
        "train": ("Hobbies: {hobbies}.", "Free time goes into {hobbies}.", "Interested in {hobbies}."),
        "val": ("Weekends are for {hobbies}.",),
    },
}
CLOSINGS = ("", "Thanks!", "Best regards", "See you soon.", "Sent from my phone")
PROMPTS: dict[Level, str] = {
    "easy": "Return only a JSON object with the keys name, age and city for this text: {text}",
    "hard": (
        "Return only a JSON object with the keys name, age, city and hobbies (a list) for this e-mail. "
        "What it does not say is null, or an empty list.\n\n{text}"
    ),
}
_TEXT = {"type": "string"}
FIELDS: dict[Level, dict[str, Any]] = {
    "easy": {"name": _TEXT, "age": {"type": "integer"}, "city": _TEXT},
    "hard": {
        "name": _TEXT,
        "age": {"type": ["integer", "null"]},
        "city": {"type": ["string", "null"]},
        "hobbies": {"type": "array", "items": _TEXT},
    },
}
SCHEMAS = {
    level: {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    for level, fields in FIELDS.items()
}


def json_extraction(
    *,
    num_rows: Count = 512,
    level: Level = "easy",
    split: Split = "train",
    golds: Literal["right", "shuffled"] = "right",
    seed: AnySeed = 0,
) -> LazyRows:
    """Rows in verl's format; the ground truth is the object as JSON text, which is `extra_info.demonstration` too.

    The splits share no name, no city, no hobby and no phrasing. `level=hard` is an e-mail with a list, in which age and city may be
    missing. `golds=shuffled` gives each row the object of another one: a control from which nothing can be learnt.
    """

    def make(index: int) -> Row:
        text, fields = _drawn(level, split, f"json_extraction:{level}:{split}:{seed}:{index}")
        if golds == "shuffled":
            _, fields = _drawn(level, split, f"json_extraction:{level}:{split}:{seed}:{index}:other")
        gold = json.dumps(fields, ensure_ascii=False)
        extra_info = {"split": split, "index": index, "demonstration": gold, "json_schema": json.dumps(SCHEMAS[level])}
        return row_of("json_extraction", PROMPTS[level].format(text=text), gold, extra_info, ability="extraction")

    return LazyRows(num_rows, make)


def _drawn(level: Level, split: Split, seed: str) -> tuple[str, dict[str, Any]]:
    rng = random.Random(seed)
    fields: dict[str, Any] = {"name": rng.choice(NAMES[split]), "age": rng.randint(18, 79), "city": rng.choice(CITIES[split])}
    if level == "easy":
        return rng.choice(PHRASINGS[split]).format(**fields), fields
    fields["age"] = fields["age"] if rng.random() < 0.7 else None
    fields["city"] = fields["city"] if rng.random() < 0.7 else None
    hobbies = fields["hobbies"] = rng.sample(HOBBIES[split], rng.choice((0, 1, 2, 3)))
    listed = fields | {"hobbies": " and ".join(filter(None, [", ".join(hobbies[:-1]), *hobbies[-1:]]))}
    details = [rng.choice(DETAILS[key][split]).format(**listed) for key in DETAILS if fields[key]]
    rng.shuffle(details)
    return " ".join(filter(None, [rng.choice(OPENINGS[split]).format(**fields), *details, rng.choice(CLOSINGS)])), fields
