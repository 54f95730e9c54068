/*
 * The files of the web page (web/), built into the program: cmake/dt_page.cmake writes the source.
 */
#ifndef DT_APPS_SERVER_PAGE_H
#define DT_APPS_SERVER_PAGE_H

#include <stddef.h>

typedef struct dt_page_file {
    const char *path; /* "/", "/chat.js" */
    const char *type; /* "text/html; charset=utf-8" */
    const unsigned char *bytes;
    size_t n_bytes;
} dt_page_file;

extern const dt_page_file dt_page_files[];
extern const size_t dt_page_n_files;

#endif
