"""JSON texts, and what looks like them: what each is, by RFC 8259 and RFC 7493, not by a parser.

After the files y_, n_ and i_ of https://github.com/nst/JSONTestSuite (MIT licence), where each is
an array of what stands alone here.
"""

#: Strings, and the text that each is.
TEXTS = {
    rb'""': "",
    rb'"\u0060\u012a\u12AB"': "`\u012a\u12ab",
    rb'"\ud83d\ude39\ud83d\udc8d"': "😹💍",
    rb'"\"\\\/\b\f\n\r\t"': '"\\/\b\f\n\r\t',
    rb'"\\u0000"': "\\u0000",
    rb'"\""': '"',
    rb'"a/*b*/c/*d//e"': "a/*b*/c/*d//e",
    rb'"\uFFFF"': "\uffff",
    rb'"\uDBFF\uDFFF"': "\U0010ffff",
    rb'"\uD834\uDd1e"': "\U0001d11e",
    rb'"\u0022"': '"',
    '"π€𝄞⍂㈴"'.encode(): "π€𝄞⍂㈴",
    b'"\x7fa\x7f"': "\x7fa\x7f",
    b'"\xe2\x80\xa8\xe2\x80\xa9"': "\u2028\u2029",
    b'"\xef\xbb\xbf"': "\ufeff",
    b'"\xf4\x8f\xbf\xbf"': "\U0010ffff",
    b' \t\r\n"a"\n': "a",
    b'"' + b"x" * 60_000 + b'"': "x" * 60_000,
    b'"' + rb"\u0061" * 10_000 + b'"': "a" * 10_000,
}

#: Other I-JSON: not the text of a plant, but taken where it is ignored.
OTHERS = [
    b"null", b"true", b"false", b"42", b"-0.1", b"-0", b"0", b"-1", b"-123", b"123.456789",
    b"1E22", b"1E-2", b"1E+2", b"0e1", b"0e+1", b"20e1", b"123e45", b"123e65", b"123.456e78",
    b"-0.000000000000000000000000000000000000000000000000000000000000000000000000000001",
    b"-123123123123123123123123123123", b"100000000000000000000", b"-1e+9999", b"1.5e+9999",
    b"123e-10000000", b"-123123e100000", b"123.456e-789", b"1" * 4300, b"1." + b"0" * 5000,
    b"0.4e" + b"9" * 30, b"1e-99999999999999999999",
    b"[]", b" [] ", b"[[]   ]", b'[""]', b'["a"]\n', b'[null, 1, "1", {}]', b"[1\n]", b"[ 4]",
    b"[1,null,null,null,2]", b"{}", b'{"":0}', b'{"a":[]}', b'{"asd":"sdf", "dfg":"fgh"}',
    b'{\n"a": "b"\n}', b'{"x":[{"id": "xxxx"}], "id": "xxxx"}', b'{"a":{"a":{"a":1}}}',
    b'{ "min": -1.0e+28, "max": 1.0e+28 }', rb'{"\u0444": "\u043a" }', rb'{"foo\u0000bar": 42}',
    rb'"\u0000"', rb'"a\u0000b"', rb'["\u0000"]',
    b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500,
    b"[" + b"[]," * 10_000 + b"[]]",
]  # fmt: skip

#: What is no JSON, or is JSON and no I-JSON, wherever it stands.
REFUSED = [
    # nothing, or not all of it
    b"", b" ", b"[", b"{", b"[1", b"[1,", b'["x"', b'[""', b"[{", b'[{"a"', b'{"a"', b'{"a":',
    b'{"":', b'{"a":"a', b'{"asd":"asd"', b'{"x": true,', b'"', b'"a', rb'"\"', rb'"\u', b'["asd]',
    b"[ false, nul", b"[ true, fals", b"[ false, tru", b"nul", b"tru", b"fals", b'["a",\n4\n,1,',
    # too much
    b'["x"]]', b"[1]]", b"[1]x", b"{}}", b"1]", b"]", b"}", b"[][]", b'{"a": true} "x"', b"2@",
    b'""x', b"1 2", b'{"a":"b"}#', b'{"a":"b"}#{}', b'[""],', b'{"a":"b"}/', b"null null",
    # other brackets, commas, colons
    b"[1 true]", b'["": 1]', b"[,1]", b"[1,,2]", b'["x",,]', b'["",]', b"[,]", b"[1,]", b"[1,,]",
    b"[   , 1]", b"[3[4]]", b"[1:2]", b"[*]", b"{]", b"[}", b"{,", b"{[", b'{[: "x"}',
    b'{"x", null}', b'{"x"::"b"}', b'{"a":"a" 123}', b'{"a" b}', b'{:"b"}', b'{"a" "b"}',
    b'{"id":0,,,}', b'{"id":0,}', b'{"a":"b",,"c":"d"}', b'{ "foo" : "bar", "a" }', b"(1)", b"<.>",
    b"[<null>]",
    # other words and comments
    b"abc", b"True", b"[True]", b"NULL", b"undefined", b"truth", b"[x", b"*", b'{"a":"b"}/**/',
    b'{"a":/*comment*/"b"}', b'{"a":"b"}//', b"# 1\n1", b"a\xc3\xa5", b"\xc3\xa5",
    b"{\xf0\x9f\x87\xa8}",
    # other names of members
    b"{a: 1}", b"{1:1}", b"{9999E9999:1}", b"{null:null}", b"{'a':0}", b"{key: 'value'}",
    # numbers
    b"+1", b"++1", b"-", b"-foo", b"- 1", b"--1", b"01", b"-01", b"-012", b"00", b".1", b"-.1",
    b".-1", b".2e-3", b"1.", b"-2.", b"2.e3", b"2.e+3", b"-1.0.", b"0.1.2", b"0e", b"0e+", b"0E",
    b"0E+", b"0.e1", b"0.3e", b"0.3e+", b"1.0e-", b"9.e+", b"1eE2", b"0e+-1", b"1e1.5", b"1ea",
    b"1 000", b"1_000", b"1,000,", b"0x1", b"0x42", b"0b1", b"0o7", b"1+2", b"-1x", b"1.2a-3",
    b"1f", b"1n", b"1.8H-308", b"NaN", b"-NaN", b"Infinity", b"-Infinity", b"+Inf", b"Inf", b"nan",
    b"\xef\xbc\x91", b"1\xd9\xa1",
    # strings
    b"'a'", b'`a`', b"[a]", b"\xc3\xa9", rb'"\a"', rb'"\x00"', rb'"\0"', rb'"\'"', b'"\\\t"',
    b'"\\\x00"', b'"\\\xf0\x9f\x8c\x80"', rb'"\u00A"', rb'"\uqqqq"', rb'"\u+123"', rb'"\u 123"',
    rb'"\u1_23"', rb'"\U0001f335"', rb'"\u{1f335}"', b'"a\x00a"', b'"new\nline"', b'"\t"',
    b'"\x1f"', rb'\u0020"a"', rb'\n', b"a\"b\"",
    # white space that is none
    b"[\x0c]", b"[\x00]", b"123\x00", b"[\xe2\x81\xa0]", b"[\xc2\xa0]", b"\xe2\x80\xa81", b"\x0b1",
    # not UTF-8
    b"\xe9", b"\xe5", b'"\xff"', b'"\xe9"', b'"\x81"', b'"\xc0\xaf"', b'"\xc0\x80"', b'"\xe0\xff"',
    b'"\xe6\x97\xa5\xd1\x88\xfa"', b'"\xf4\xbf\xbf\xbf"', b'"\xfc\x83\xbf\xbf\xbf\xbf"',
    b'"\xe0\x80\xaf"', b'"\xed\xa0\x80"', b'"\xed\xa0\x81\xed\xb0\xb7"', b'"\\u\xe5"', b'"\\\xe5"',
    b"123\xe5", b"1e1\xe5", b'{"\xb9":"0"}', '"é"'.encode("utf-16"), '["é"]'.encode("utf-16-le"),
    '["é"]'.encode("utf-16-be"), '"a"'.encode("utf-32"), b"\xef\xbb\xbf", b"\xef\xbb\xbf{}",
    b"\xef\xbb{}",
    # JSON, but not I-JSON: halves of pairs, a name twice
    rb'"\ud800"', rb'"\uDFAA"', rb'"\uDADA"', rb'"\uD888\u1234"', rb'"\uD800\n"', rb'"\uDd1ea"',
    rb'"\uD800\uD800\n"', rb'"\ud800abc"', rb'"\uDd1e\uD834"', rb'["\ud800"]', rb'{"\uDFAA":0}',
    b'{"a":"b","a":"c"}', b'{"a":"b","a":"b"}', rb'{"a":1,"\u0061":1}', b'{"x":{"a":1,"a":1}}',
    # more than anybody should take
    b"[" * 60_000, b'[{"":' * 12_000, b"1" * 4301, b"-" + b"1" * 60_000,
]  # fmt: skip
