"""The ways through a loop of machine code."""

from benchmarks.ways import ways

LOOP = """.L_x_1:
 HGMMA R0 ;
 @!P0 BRA `(.L_x_2) ;
 HGMMA R8 ;
 BRA `(.L_x_3) ;
.L_x_2:
 MOV R8 ;
.L_x_3:
 @P1 BRA `(.L_x_4) ;
 FSEL R0 ;
.L_x_4:
 @P2 BRA `(.L_x_1) ;"""


def instructions(way: str) -> list[str]:
    return [line.split()[0] for line in way.splitlines() if ";" in line]


def test_both_ways_have_all_products_and_differ_by_the_branch_of_the_mask():
    shortest, longest = map(instructions, ways(LOOP))
    assert shortest == ["HGMMA", "@!P0", "HGMMA", "BRA", "@P1", "@P2"]
    assert longest == ["HGMMA", "@!P0", "HGMMA", "BRA", "@P1", "FSEL", "@P2"]


def test_a_loop_whose_ways_leave_the_text_is_taken_as_a_whole():
    parted = ".L_x_1:\n HGMMA R0 ;\n BRA `(.L_x_9) ;\n MOV R1 ;\n @P0 BRA `(.L_x_1) ;"
    assert ways(parted) == (parted, parted)
