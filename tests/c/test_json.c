#include "json.h"

#include <stdlib.h>

#include "check.h"

/* --- text ----------------------------------------------------------------- */

/* Checks that the text is exactly `expected`; clears it. */
static void
check_text(cer_text *text, const char *expected)
{
    cer_text_add_char(text, '\0');
    CHECK(!text->failed);
    CHECK_EQ_STR(text->bytes, expected);
    cer_text_clear(text);
    CHECK(text->bytes == NULL);
}

static void
numbers_are_written(void)
{
    cer_text text = {0};

    cer_text_add_u64(&text, 0);
    cer_text_add_char(&text, ' ');
    cer_text_add_u64(&text, UINT64_MAX);
    cer_text_add_char(&text, ' ');
    cer_text_add_i64(&text, INT64_MIN);
    cer_text_add_char(&text, ' ');
    cer_text_add_i64(&text, INT64_MAX);
    check_text(&text, "0 18446744073709551615 -9223372036854775808 "
                      "9223372036854775807");
}

static void
strings_are_escaped(void)
{
    cer_text text = {0};
    static const char raw[] = "a\"b\\c\n\t\r\b\f\x01\x1f\x7f/\xc3\xbc";

    cer_json_add_string(&text, raw, sizeof raw - 1);
    check_text(&text,
               "\"a\\\"b\\\\c\\n\\t\\r\\b\\f\\u0001\\u001f\x7f/\xc3\xbc\"");
}

static void
pointer_tokens_are_escaped(void)
{
    cer_text text = {0};

    cer_json_add_pointer(&text, "~a/b~1", 6);
    cer_json_add_pointer(&text, "", 0);
    cer_json_add_pointer(&text, "plain", 5);
    check_text(&text, "~0a~1b~01plain");
}

/* --- reader --------------------------------------------------------------- */

/* One letter for each token until the end or "!" for an invalid one. */
static const char *
kinds_of(const char *json)
{
    static char kinds[4096];
    static const char letters[] = "!.{}[]ksn10-";
    cer_json_reader reader;
    cer_json_token token;
    size_t n = 0;

    cer_json_init(&reader, json, strlen(json));
    do
        kinds[n++] = letters[cer_json_next(&reader, &token)];
    while (token.kind != CER_JSON_END && token.kind != CER_JSON_INVALID &&
           n < sizeof kinds - 1);
    kinds[n] = '\0';
    CHECK((token.kind == CER_JSON_INVALID) == (reader.problem != NULL));
    return kinds;
}

static void
valid_texts_are_read(void)
{
    CHECK_EQ_STR(kinds_of("1"), "n.");
    CHECK_EQ_STR(kinds_of(" \t\r\n{} "), "{}.");
    CHECK_EQ_STR(kinds_of("[ ]"), "[].");
    CHECK_EQ_STR(kinds_of("[true,false , null]"), "[10-].");
    CHECK_EQ_STR(kinds_of("{\"a\":1,\"b\":[{}]}"), "{knk[{}]}.");
    CHECK_EQ_STR(kinds_of("[0,-0,0.5,-1.25e+10,1E5,2e-3]"), "[nnnnnn].");
    CHECK_EQ_STR(kinds_of("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00fC\""), "s.");
    CHECK_EQ_STR(kinds_of("\"\xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80\x7f\""),
                 "s.");
}

static void
invalid_texts_are_refused(void)
{
    static const char *const texts[] = {"",
                                        " ",
                                        "{",
                                        "[",
                                        "[1",
                                        "[1,",
                                        "[1,]",
                                        "[,1]",
                                        "{\"a\"}",
                                        "{\"a\":}",
                                        "{\"a\":1,}",
                                        "{1:2}",
                                        "{\"a\" 1}",
                                        "[1 2]",
                                        "]",
                                        "}",
                                        "[}",
                                        "{]",
                                        "1 2",
                                        "{} []",
                                        "nul",
                                        "nulL",
                                        "tru",
                                        "True",
                                        "NaN",
                                        "Infinity",
                                        "+1",
                                        "01",
                                        "-",
                                        "-a",
                                        "1.",
                                        ".5",
                                        "1e",
                                        "1e+",
                                        "0x1",
                                        "'a'",
                                        "\"",
                                        "\"a",
                                        "\"\\",
                                        "\"\\x\"",
                                        "\"\\u12\"",
                                        "\"\\u12g4\"",
                                        "\"\n\"",
                                        "\"\x1f\"",
                                        "\"\x80\"",
                                        "\"\xc0\x80\"",
                                        "\"\xc1\xbf\"",
                                        "\"\xc3\"",
                                        "\"\xc3(\"",
                                        "\"\xe0\x80\x80\"",
                                        "\"\xed\xa0\x80\"",
                                        "\"\xe2\x82\"",
                                        "\"\xf0\x80\x80\x80\"",
                                        "\"\xf4\x90\x80\x80\"",
                                        "\"\xf5\x80\x80\x80\"",
                                        "\"\xff\"",
                                        "// x",
                                        "[1]x",
                                        "\xef\xbb\xbf[]"};

    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        const char *kinds = kinds_of(texts[i]);

        if (kinds[strlen(kinds) - 1] != '!')
            CHECK_EQ_STR(texts[i], "refused");
    }
}

/* Every prefix of a text is read without a read past its end; the sanitizers
 * check a copy of exactly that size. */
static void
texts_may_end_anywhere(void)
{
    static const char whole[] =
        "{\"a\\u00e9\\n\xf0\x9f\x98\x80\":[-1.5e+3,true,"
        "false,null,{\"\":\"\xc3\xbc\"}]}";

    for (size_t len = 0; len < sizeof whole - 1; len++) {
        char *cut = malloc(len + (len == 0));
        cer_json_reader reader;
        cer_json_token token;
        int tokens = 0;

        memcpy(cut, whole, len);
        cer_json_init(&reader, cut, len);
        while (cer_json_next(&reader, &token) != CER_JSON_INVALID &&
               token.kind != CER_JSON_END)
            tokens++;
        CHECK_EQ_INT(token.kind, CER_JSON_INVALID);
        CHECK(tokens < 20);
        free(cut);
    }
}

static void
depth_is_limited(void)
{
    char deep[CER_JSON_DEPTH + 2];
    cer_json_reader reader;
    cer_json_token token;

    memset(deep, '[', sizeof deep);
    cer_json_init(&reader, deep, sizeof deep);
    for (int i = 0; i < CER_JSON_DEPTH; i++)
        CHECK_EQ_INT(cer_json_next(&reader, &token), CER_JSON_ARRAY);
    CHECK_EQ_INT(cer_json_next(&reader, &token), CER_JSON_INVALID);
    CHECK_EQ_STR(reader.problem, "nested too deep");
}

/* Reads one token from `json`. */
static cer_json_token
token_of(const char *json)
{
    cer_json_reader reader;
    cer_json_token token;

    cer_json_init(&reader, json, strlen(json));
    cer_json_next(&reader, &token);
    return token;
}

static void
strings_are_unescaped(void)
{
    cer_json_token token =
        token_of("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00fc\\u20ac"
                 "\\ud83d\\ude00\xc3\xbc\"");
    char out[64] = "";

    CHECK(token.escaped);
    CHECK_EQ_INT(cer_json_unescape(&token, out), 20);
    CHECK_EQ_STR(out, "\"\\/\b\f\n\r\tA\xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80"
                      "\xc3\xbc");
}

static void
lone_surrogates_are_no_text(void)
{
    static const char *const texts[] = {
        "\"\\ud800\"",        "\"\\udc00\"",        "\"\\ud800x\"",
        "\"\\ud800\\n1234\"", "\"\\ud800\\u0041\"", "\"\\ud800\\ud800\""};
    char out[64];

    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        cer_json_token token = token_of(texts[i]);

        CHECK_EQ_INT(token.kind, CER_JSON_STRING);
        CHECK(cer_json_unescape(&token, out) == SIZE_MAX);
    }
}

static void
integers_are_checked(void)
{
    cer_json_token token;
    uint64_t u = 7;
    int64_t i = 7;

    token = token_of("18446744073709551615");
    CHECK(cer_json_u64(&token, &u) && u == UINT64_MAX);
    CHECK(!cer_json_i64(&token, &i));
    token = token_of("18446744073709551616");
    CHECK(!cer_json_u64(&token, &u));
    token = token_of("-9223372036854775808");
    CHECK(cer_json_i64(&token, &i) && i == INT64_MIN);
    CHECK(!cer_json_u64(&token, &u));
    token = token_of("-9223372036854775809");
    CHECK(!cer_json_i64(&token, &i));
    token = token_of("1.0");
    CHECK(!cer_json_i64(&token, &i) && !cer_json_u64(&token, &u));
    token = token_of("\"1\"");
    CHECK(!cer_json_i64(&token, &i) && !cer_json_u64(&token, &u));
}

CHECK_MAIN(numbers_are_written, strings_are_escaped, pointer_tokens_are_escaped,
           valid_texts_are_read, invalid_texts_are_refused,
           texts_may_end_anywhere, depth_is_limited, strings_are_unescaped,
           lone_surrogates_are_no_text, integers_are_checked)
