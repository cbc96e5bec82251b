from research.stories.works import works_of


def test_a_books_chapters_are_one_work_and_every_other_document_is_its_own():
    sources = [{"title": "A Book", "documents": "2", "characters": "7"}]
    sources += [{"title": "A Tale", "documents": "1", "characters": "3"}]
    documents = ["abc", "defg", "abc", "x", "defg", "abc"]
    assert works_of(documents, sources) == ["A Book", "A Book", "A Tale", "document 4", "A Book", "A Book"]
