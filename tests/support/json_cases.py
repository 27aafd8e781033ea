"""JSON texts, and what looks like them: what each is, by RFC 8259 and RFC 7493, not by a parser.

After the files y_, n_ and i_ of https://github.com/nst/JSONTestSuite (MIT licence), where each is
an array of what stands alone here; of those that differ in little, one.
"""

#: Strings, and the text that each is.
TEXTS = {
    rb'""': "",
    rb'"\"\\\/\b\f\n\r\t"': '"\\/\b\f\n\r\t',
    rb'"\\u0000"': "\\u0000",
    rb'"\u0060\u12AB\uFFFF"': "`\u12ab\uffff",
    rb'"\ud83d\ude39\uDBFF\uDFFF"': "😹\U0010ffff",
    '"π€𝄞⍂㈴\x7f\u2028\ufeff"'.encode(): "π€𝄞⍂㈴\x7f\u2028\ufeff",
    b'"\xf4\x8f\xbf\xbf"': "\U0010ffff",
    b' \t\r\n"a"\n': "a",
    b'"' + b"x" * 60_000 + b'"': "x" * 60_000,
    b'"' + rb"\u0061" * 10_000 + b'"': "a" * 10_000,
}

#: Other I-JSON: not the text of a plant, but taken where it is ignored.
OTHERS = [
    *(b"null", b"true", b"42", b"-0", b"123.456e78", b"1E22", b"1E-2", b"0e+1", b"1" * 4300),
    *(b"100000000000000000000", b"-1e+9999", b"1." + b"0" * 5000, b"0.4e" + b"9" * 30),
    *(b"1e-99999999999999999999", b" [ ] ", b'[null, 1, "1", {}]', b'{"": 0}', b'{"a": {"a": 1}}'),
    *(rb'"\u0000"', rb'{"foo\u0000bar": 42}', b'{"x": [{"id": "x"}], "id": "x"}'),
    *(b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500, b"[" + b"[]," * 10_000 + b"[]]"),
]

#: What is no JSON, or is JSON and no I-JSON, wherever it stands.
REFUSED = [
    # nothing, not all of it, or too much
    *(b"", b" ", b"[1,", b'{"a":', b'"a', rb'"\u', b"nul", b"[1]]", b"{}}", b"1 2", b"{}#", b"[]/"),
    # other brackets, commas, colons, words, names
    *(b"[1 true]", b"[,1]", b"[1,]", b"[1:2]", b"[}", b'{"x"::1}', b'{"a": 1,}', b'{"a" "b"}'),
    *(b"True", b"undefined", b"[x", b"/**/1", b"# 1\n1", b"{a: 1}", b"{1: 1}", b"{'a': 0}"),
    # numbers
    *(b"+1", b"--1", b"- 1", b"01", b"-012", b".1", b"1.", b"2.e3", b"0e", b"1e1.5", b"1 000"),
    *(b"1_000", b"0x42", b"1n", b"NaN", b"-NaN", b"Infinity", b"-Infinity", b"\xef\xbc\x91"),
    # strings
    *(b"'a'", b"`a`", rb'"\a"', rb'"\x00"', b'"\\\t"', rb'"\u00A"', rb'"\u+123"', rb'"\u1_23"'),
    *(rb'"\u{1f335}"', b'"a\x00a"', b'"new\nline"', b'"\t"', b'"\x1f"', rb'\u0020"a"'),
    # white space that is none
    *(b"[\x0c]", b"[\x00]", b"123\x00", b"[\xe2\x81\xa0]", b"[\xc2\xa0]", b"\xe2\x80\xa81"),
    # not UTF-8, or with a byte order mark
    *(b"\xe9", b'"\xff"', b'"\xc0\xaf"', b'"\xf4\xbf\xbf\xbf"', b'"\xed\xa0\x80"', b'"\\u\xe5"'),
    *(b"123\xe5", b'{"\xb9":"0"}', b"\xef\xbb\xbf{}", b"\xef\xbb{}"),
    *('["é"]'.encode(f"utf-{name}") for name in ("16", "16-le", "16-be", "32")),
    # JSON, but not I-JSON: halves of pairs, a name twice
    *(rb'"\ud800"', rb'"\uDFAA"', rb'"\uD888\u1234"', rb'"\uD800\uD800\n"', rb'"\uDd1e\uD834"'),
    *(rb'["\ud800"]', rb'{"\uDFAA":0}', b'{"a":"b","a":"b"}', rb'{"a":1,"\u0061":1}'),
    b'{"x":{"a":1,"a":1}}',
    # more than anybody should take
    *(b"[" * 60_000, b'[{"":' * 12_000, b"1" * 4301, b"-" + b"1" * 60_000),
]
