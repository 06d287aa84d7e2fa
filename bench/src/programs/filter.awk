# How often each word is there, and where first and last.
{
	for (nth = 1; nth <= NF; nth++) {
		if (!($nth in count)) first[$nth] = NR
		count[$nth]++
		last[$nth] = NR
	}
}
END {
	PROCINFO["sorted_in"] = "@ind_str_asc"
	for (word in count) if (count[word] > 1) print word, count[word], first[word], last[word]
	print length(count), NR
}
