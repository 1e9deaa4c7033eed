"""Neutral sentences, on which it is measured how far experts and merges are from their base."""

SENTENCES = (
    "The river rises in the hills to the north and reaches the sea after about two hundred kilometres.",
    "Most of the houses in the old town were built of brick after a fire had destroyed the wooden ones.",
    "When water freezes it expands, which is why ice floats and why pipes can burst in a cold winter.",
    "She closed the book, put on her coat, and walked to the station without looking back at the house.",
    "The committee met twice a year to discuss the budget and to choose the projects that it would support.",
    "Bees visit flowers to collect nectar, and carry some of the pollen from one plant to the next.",
    "The first train left before sunrise, so the platform was empty except for two workers and a dog.",
    "A good map shows not only roads and villages but also how the land rises and falls between them.",
)
