"""Images of vision-language models: their ids in rows of tokens, their sizes, files and pixels."""
