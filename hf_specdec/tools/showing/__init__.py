"""How figures are shown, whoever made them: coloured text, HTML pages, words for pretended costs."""
