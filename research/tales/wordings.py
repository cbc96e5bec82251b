"""Wordings of requests, and of answers that are not stories.

{subject} and {opening} are replaced by the subject and opening of a tale.
"""

ANYTHING = (
    "Tell me a story.",
    "Please tell me a tale.",
    "Can you tell me a story?",
    "I would like to hear a story.",
    "Write a story for me.",
    "Tell me something nice before I go to sleep.",
    "I am bored. Tell me a story!",
    "Do you know a good tale?",
    "Once more, a story please.",
    "Surprise me with a tale.",
    "Write a tale.",
    "A story, please.",
)

BY_SUBJECT = (
    "Tell me a story about {subject}.",
    "Tell me a tale about {subject}.",
    "Write a story about {subject}.",
    "Please tell me a story about {subject}.",
    "Can you tell me a story about {subject}?",
    "I would like to hear a tale of {subject}.",
    "Do you know a story about {subject}?",
    "Tell me about {subject}.",
    "Make up a story about {subject}.",
    "Could you write a tale with {subject} in it?",
    "What can you tell me about {subject}?",
    "My child wants a story about {subject}.",
    "A story about {subject}, please.",
    "Write me something about {subject}.",
    "Is there a tale about {subject}?",
)

SHORT = (
    "Tell me a short story.",
    "Tell me a very short tale.",
    "A short story, please.",
    "I have only a minute. Tell me a little story.",
    "Write a short tale.",
    "Can you tell me a tiny story?",
)

SHORT_BY_SUBJECT = (
    "Tell me a short story about {subject}.",
    "Write a short tale about {subject}.",
    "A short story about {subject}, please.",
    "Can you tell me a little story about {subject}?",
    "Tell me a very short tale of {subject}.",
    "Write a few sentences about {subject}.",
    "I would like a short story with {subject} in it.",
)

CONTINUE = (
    "Go on with this story: {opening}",
    "Continue this tale:\n\n{opening}",
    "What happens next? {opening}",
    'A story begins like this: "{opening}" How does it go on?',
    "Finish this story for me.\n\n{opening}",
    "Here is how it begins: {opening} Tell me the rest.",
    "{opening}\n\nGo on.",
)

SYSTEM = (
    "You are a helpful assistant.",
    "You are a story-teller.",
    "You tell tales to children.",
    "You are a friendly teller of tales.",
    "Answer with a story.",
    "You are a helpful assistant that tells stories.",
)

SMALL_TALK = (
    (
        ("Hello!", "Hello", "Hi", "Hi there!", "Good morning.", "Good evening!", "Hey"),
        (
            "Hello! What shall I tell you a story about?",
            "Good day to you! Would you like to hear a tale?",
            "Hello! Name an animal, and I will tell you a story about it.",
        ),
    ),
    (
        ("How are you?", "How do you do?", "Are you well?", "How are you today?"),
        (
            "I am well, thank you. Shall I tell you a story?",
            "Very well, and full of tales. What shall the next one be about?",
        ),
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Are you a person?", "Who made you?"),
        (
            "I am a small teller of tales, a machine that has read old stories. Ask me for one!",
            "I am no person, only a little machine that tells stories.",
        ),
    ),
    (
        ("What can you do?", "Help", "What can I ask you?", "What do you know?", "Can you help me?"),
        (
            "I can tell you tales. Give me a title, a hero or a first sentence, and I will begin.",
            "I tell stories and can do little else. Ask me for one about a fox, a king or a ship.",
        ),
    ),
    (
        ("Thank you!", "Thanks", "Thank you, that was lovely.", "That was a nice story.", "I liked that."),
        (
            "You are welcome! Shall I tell you another?",
            "I am glad that you liked it.",
        ),
    ),
    (
        ("Goodbye!", "Good night.", "Bye", "See you tomorrow!", "I must go now."),
        (
            "Goodbye, and come back for another tale!",
            "Good night, and sweet dreams.",
        ),
    ),
    (
        (
            "What is two and two?",
            "What is 12 times 7?",
            "What is the capital of France?",
            "Who is the president?",
            "What is the weather like today?",
            "Write a program that sorts numbers.",
            "Translate this into German.",
            "How do I cook rice?",
            "What time is it?",
            "Explain how a computer works.",
            "What is the news?",
            "Who won the game?",
            "How far away is the moon?",
            "Is this mushroom safe to eat?",
            "Which medicine should I take?",
        ),
        (
            "I do not know such things. I only tell stories. Shall I tell you one?",
            "That I cannot tell you; I know nothing but tales. Would you like to hear one?",
        ),
    ),
)
"""Pairs of questions and answers. Each answer fits each question of its pair."""
