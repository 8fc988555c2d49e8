"""What generated prompts are about. Short phrases, combined with the questions of `prompts`."""

from __future__ import annotations

SUBJECTS = """
photosynthesis; gravity; black holes; the water cycle; plate tectonics; earthquakes; volcanoes; the ozone
layer; electric motors; batteries; solar panels; wind turbines; nuclear energy; magnets; sound waves; the
speed of light; DNA; cell division; the immune system; antibiotics; the human heart; sleep; memory; the
digestive system; evolution; natural selection; whales; honey bees; ants; migration of birds; coral reefs;
rain forests; deserts; the Moon; tides; comets; Mars; the life of a star; telescopes; rockets; satellites;
the periodic table; acids; chemical bonds; crystals; rust; fire; steam engines; bridges; concrete; glass;
paper; ink; clocks; compasses; the Roman Empire; ancient Egypt; the Silk Road; the Renaissance; the French
Revolution; the Industrial Revolution; the Cold War; the Vikings; the Great Wall of China; the invention of
writing; railways; aviation; the telegraph; Marie Curie; Isaac Newton; Leonardo da Vinci; Ada Lovelace;
Charles Darwin; William Shakespeare; Beethoven; democracy; inflation; supply and demand; taxes; interest
rates; insurance; mortgages; stock markets; trade unions; the United Nations; human rights; copyright;
public libraries; advertising; city planning; recycling; compost; bread; cheese; coffee; tea; chocolate;
olive oil; rice; pasta; soup; pickles; spices; a healthy breakfast; running; swimming; yoga; chess;
football; cycling to work; gardening; house plants; painting; photography; playing the guitar; choirs; jazz;
opera; folk tales; poetry; novels; short stories; museums; theatre; film editing; meditation; stress;
friendship; good habits; time management; public speaking; job interviews; teamwork; budgets; saving money;
moving to a new city; travelling alone; camping; sailing; learning a language; raising a dog; cats;
aquariums; birthdays; weddings; first aid; headaches; allergies; vitamins; dental care; eyesight; posture;
the internet; search engines; email; passwords; encryption; computer viruses; operating systems; compilers;
databases; spreadsheets; machine learning; neural networks; robots; recursion; sorting; binary numbers; hash
tables; version control; unit tests; web browsers; HTTP; cloud computing; mobile phones; GPS; bar codes; 3D
printing; statistics; probability; prime numbers; fractions; the Pythagorean theorem; calculus; matrices;
graphs; logic; critical thinking; ethics; philosophy of science; Socrates; the scientific method; surveys;
maps; languages; dialects; sign language; dreams; humour; fashion; architecture; furniture; lighthouses;
castles; harbours; markets; islands
"""

PLACES = """
Japan; Brazil; Kenya; Norway; Canada; India; Italy; Mexico; Egypt; Australia; Vietnam; Portugal; Iceland;
Peru; Morocco; Turkey; Greece; Poland; Chile; Indonesia; Paris; London; New York; Tokyo; Istanbul; Lisbon;
Vienna; Prague; Buenos Aires; Cape Town; Sydney; Singapore; Montreal; Dublin; Edinburgh; Athens; Rome;
Berlin; Helsinki; Amsterdam
"""

PEOPLE = """
a teacher; a child of ten; a retired engineer; a new manager; a nurse; a student; a shop owner; a farmer; a
parent; a software developer; a journalist; a musician; a small team; a beginner; an older person; a curious
neighbour
"""

CODE_TASKS = """
checks whether a string is a palindrome; reverses a linked list; counts the words in a text; merges two
sorted lists; finds the largest element of a list; computes the factorial of a number; generates the first n
Fibonacci numbers; removes duplicates from a list while keeping order; converts Celsius to Fahrenheit;
checks whether a number is prime; finds all divisors of a number; computes the greatest common divisor;
flattens a nested list; reads a CSV file; writes a dictionary to a JSON file; counts how often each letter
occurs; sorts a list of tuples by the second item; implements binary search; implements a stack; implements
a queue with two stacks; validates an email address; rotates a list by k places; finds the second largest
number; computes the average of a list; transposes a matrix; multiplies two matrices; finds the longest
common prefix; checks balanced parentheses; computes the sum of digits; converts a decimal number to binary;
converts Roman numerals to integers; finds anagrams in a list of words; computes compound interest;
generates a random password; measures how long a function takes; caches results of a function; downloads a
web page; retries a function three times; parses command-line arguments; logs messages to a file; groups
records by a key; splits a list into chunks of n; finds the intersection of two lists; computes a moving
average; implements quicksort; implements breadth-first search; finds the shortest path in a graph; inserts
into a binary tree; checks whether two strings are anagrams; capitalizes each word; replaces vowels with a
star; finds missing numbers; simulates a dice roll; plays rock, paper, scissors; manages a to-do list;
models a bank account; models a library; converts seconds to hours and minutes; validates a date; counts
lines in a file; finds files by extension; renames files; computes the distance between two points; checks
whether a year is a leap year; prints a multiplication table; draws a triangle of stars; computes the
median; finds the mode; normalizes a list of numbers; encodes a Caesar cipher
"""

LANGUAGES = [
    "Python",
    "Python",
    "Python",
    "Python",
    "JavaScript",
    "Java",
    "C",
    "C++",
    "Go",
    "Rust",
    "SQL",
    "Bash",
]


def items(text: str) -> list[str]:
    """The phrases of one of the lists above."""
    return [" ".join(item.split()) for item in text.split(";")]


def split_items(text: str, heldout: bool) -> list[str]:
    """Every tenth phrase is kept for held-out sets, the others for training."""
    return [item for index, item in enumerate(items(text)) if (index % 10 == 3) == heldout]
