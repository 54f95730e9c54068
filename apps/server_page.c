/*
 * What a browser gets at /. See server_page.h.
 */
#include "server_page.h"

static const unsigned char index_html[] = "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>DeepTutor</title>"
                                          "<p>DeepTutor serves the OpenAI API here: <code>/v1/chat/completions</code>, "
                                          "<code>/v1/completions</code>, <code>/v1/models</code>.</p></html>\n";

const dt_page_file dt_page_files[] = {
    {"/", "text/html; charset=utf-8", index_html, sizeof index_html - 1},
};
const size_t dt_page_n_files = sizeof dt_page_files / sizeof dt_page_files[0];
