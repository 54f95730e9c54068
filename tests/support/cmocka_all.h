/* cmocka wants these four headers before its own, in this order. */
#ifndef DT_TEST_CMOCKA_ALL_H
#define DT_TEST_CMOCKA_ALL_H

/* clang-format off */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#endif
